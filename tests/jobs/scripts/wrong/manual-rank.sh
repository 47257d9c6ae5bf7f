#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2

export RANK=$SLURM_PROCID
srun --kill-on-bad-exit=1 python train.py
