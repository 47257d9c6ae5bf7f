#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=8
#SBATCH --time=2:00:00

module load openmpi
srun mpirun -np 8 python train.py
