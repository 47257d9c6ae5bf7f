#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --signal=B:USR2@20

trap 'touch stop' USR2
python train.py & wait
wait
