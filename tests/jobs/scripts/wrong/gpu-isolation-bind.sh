#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

srun -K --gpu-bind=single:1 python train.py
