#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 python -m torch.distributed.launch --nproc_per_node=4 --nnodes=2 --node_rank=0 \
    --master_addr="$head" --master_port=$((20000 + SLURM_JOB_ID % 10000)) train.py
