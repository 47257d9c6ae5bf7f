#!/bin/bash
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2 --cpus-per-gpu=8

srun --kill-on-bad-exit=1 torchrun --nproc-per-node 2 train.py --epochs 3
