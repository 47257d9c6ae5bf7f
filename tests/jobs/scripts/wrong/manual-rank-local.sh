#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=4

export LOCAL_RANK=$SLURM_LOCALID
srun --kill-on-bad-exit=1 python train.py
