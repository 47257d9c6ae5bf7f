#!/bin/bash
#SBATCH --ntasks=1
#SBATCH -t 60
#SBATCH --partition=main
#SBATCH --time=1-00:00:00

python train.py
