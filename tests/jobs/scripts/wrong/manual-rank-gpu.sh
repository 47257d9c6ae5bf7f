#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
srun --kill-on-bad-exit=1 python train.py
