#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

srun --mpi=pmi2 horovodrun -np 8 -H localhost:8 python train.py
