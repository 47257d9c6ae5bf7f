#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --output=train-%i.log

srun hostname
