#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --gpu-bind=closest
#SBATCH --cpus-per-gpu=8

srun --kill-on-bad-exit=1 python train.py
