#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --signal=B:USR2@120

trap 'touch stop' SIGUSR1 TERM
python train.py &
wait
