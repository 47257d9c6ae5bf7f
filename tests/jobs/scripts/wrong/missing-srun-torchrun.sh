#!/bin/bash
#SBATCH -N 4 --gres=gpu:a100:4 --cpus-per-gpu=8 -t 8:00:00

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
torchrun --nnodes=4 --nproc-per-node=4 --rdzv-backend=c10d \
    --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-id="$SLURM_JOB_ID" train.py
