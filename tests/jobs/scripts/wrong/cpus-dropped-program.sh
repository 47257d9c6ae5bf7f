#!/bin/bash -l
#SBATCH -n 4 -c 16
#SBATCH -t 30

module purge
srun ./solver input.nml
