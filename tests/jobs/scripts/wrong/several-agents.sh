#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun -K python -m torch.distributed.run --nnodes=2 --nproc-per-node=4 \
    --rdzv-backend=c10d --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" train.py
