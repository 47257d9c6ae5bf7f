#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=1 python train.py
