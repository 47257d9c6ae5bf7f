#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4

export OMP_NUM_THREADS=4
exec python3 -u train.py
