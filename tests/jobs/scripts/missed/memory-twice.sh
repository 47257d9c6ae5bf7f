#!/bin/bash
#SBATCH --ntasks=4
#SBATCH --mem=64G
#SBATCH --mem-per-cpu=4G

srun -K python train.py
