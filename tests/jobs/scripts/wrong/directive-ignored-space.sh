#!/bin/bash
#SBATCH --ntasks=1
# SBATCH --time=24:00:00

python train.py
