#!/bin/bash
#SBATCH --ntasks=1
#SBATCH -e %j/errors.txt

python train.py
