#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --open-mode=append

again() {
    echo "again"
    scontrol requeue $SLURM_JOB_ID
}
trap again TERM
python train.py --resume &
wait
