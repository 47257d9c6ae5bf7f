#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

srun --kill-on-bad-exit=1 python train.py
