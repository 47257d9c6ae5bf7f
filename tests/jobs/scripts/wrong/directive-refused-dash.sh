#!/bin/bash
#SBATCH --ntasks=1
#SBATCH –time=60

srun hostname
