#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --signal=B:USR3@60

srun hostname
