#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

export RANK=$((SLURM_NODEID * 4 + SLURM_LOCALID))
srun --kill-on-bad-exit=1 python train.py
