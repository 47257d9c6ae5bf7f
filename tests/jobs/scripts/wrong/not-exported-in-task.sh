#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d \
    --rdzv-endpoint="$head_node:$((20000 + SLURM_JOB_ID % 10000))" train.py'
