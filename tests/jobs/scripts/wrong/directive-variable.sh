#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --output=/scratch/$USER/%j.log

srun hostname
