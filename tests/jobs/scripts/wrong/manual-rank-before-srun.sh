#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=4

RANK=$SLURM_PROCID srun --kill-on-bad-exit=1 python train.py
