#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

srun --kill-on-bad-exit=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 \
    --rdzv-backend=c10d --rdzv-endpoint="localhost:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-id="$SLURM_JOB_ID" train.py
