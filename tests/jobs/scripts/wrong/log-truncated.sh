#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --requeue

python train.py --resume
