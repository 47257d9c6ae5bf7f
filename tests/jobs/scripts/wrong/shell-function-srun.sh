#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2

srun source venv/bin/activate
srun --kill-on-bad-exit=1 python train.py
