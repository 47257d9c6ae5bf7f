#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --time=24h

srun hostname
