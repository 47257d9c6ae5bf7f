#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --time=10
#SBATCH --signal=B:USR2@600

trap 'touch stop' USR2
python train.py & wait
wait
