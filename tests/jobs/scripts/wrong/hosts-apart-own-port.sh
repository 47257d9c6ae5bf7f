#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

export head=$(hostname)
srun --kill-on-bad-exit=1 bash -c 'torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=$head --master-port=$((20000 + RANDOM % 10000)) train.py'
