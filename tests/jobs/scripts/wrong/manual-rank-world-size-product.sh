#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2 --cpus-per-gpu=8

export WORLD_SIZE=$(($SLURM_NNODES * 1))
srun --kill-on-bad-exit=1 python train.py
