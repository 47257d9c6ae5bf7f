#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:12@120

trap 'touch stop' USR2
srun --kill-on-bad-exit=1 python train.py
