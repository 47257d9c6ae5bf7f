#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --job-name=run#7 --time=60

srun hostname
