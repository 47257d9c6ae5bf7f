#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --export=NONE

module load python
srun python train.py
