#!/bin/bash
#SBATCH --ntasks=1

srun hostname
python train.py
