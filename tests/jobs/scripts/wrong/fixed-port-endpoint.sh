#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=4 \
    --rdzv-backend=c10d --rdzv-endpoint="$head:29400" train.py
