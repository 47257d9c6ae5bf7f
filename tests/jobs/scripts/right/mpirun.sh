#!/bin/bash
#SBATCH -n 64
#SBATCH --mem-per-cpu=2G
#SBATCH --time=12:00:00

. /etc/profile.d/modules.sh
module load openmpi
export OMP_NUM_THREADS=1
mpirun -np $SLURM_NTASKS python train.py
