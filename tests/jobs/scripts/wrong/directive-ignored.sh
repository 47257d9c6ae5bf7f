#!/bin/bash
#SBATCH --nodes=2
set -e

#SBATCH --ntasks-per-node=4
srun hostname
