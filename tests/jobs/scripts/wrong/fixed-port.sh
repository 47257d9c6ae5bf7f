#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500
srun --kill-on-bad-exit=1 python train.py
