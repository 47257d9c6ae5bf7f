#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --cpu-bind=cores

srun hostname
