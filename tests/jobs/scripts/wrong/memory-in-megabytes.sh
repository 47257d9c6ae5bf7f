#!/bin/bash
#SBATCH --ntasks=4
#SBATCH --mem=64

srun -K python train.py
