#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --signal=B:USR1@120

python train.py &
wait
