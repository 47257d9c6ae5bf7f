#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

export OMP_NUM_THREADS=4
exec python3 -u train.py
