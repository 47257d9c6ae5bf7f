#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --chdir ~/project

srun hostname
