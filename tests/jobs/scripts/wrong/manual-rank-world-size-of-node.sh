#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS_PER_NODE
srun --kill-on-bad-exit=1 python train.py
