#!/bin/bash
#SBATCH --ntasks=1

python train.py
sbatch --dependency=afterok:$SLURM_JOB_ID evaluate.sh
