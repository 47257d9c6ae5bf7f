#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2

export WORLD_SIZE=8
srun --kill-on-bad-exit=1 python train.py
