#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:4 --cpus-per-gpu=8

srun torchrun --standalone --nproc_per_node 2 train.py
