#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32

export MASTER_ADDR=$(hostname) MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))
srun -c 32 --kill-on-bad-exit=1 python spawn.py
# A seed for each, and a port of its own.
srun -c 32 -K bash -c 'MASTER_ADDR=$(hostname) MASTER_PORT=$((29000 + RANDOM % 1000)) python spawn.py --seed $SLURM_PROCID'
