#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --open-mode=append
#SBATCH --time=1:00:00

timeout 50m python train.py --resume
if [ $? = 124 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
