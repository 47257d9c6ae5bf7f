#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --signal=USR1@120

save() { touch "$SLURM_SUBMIT_DIR/stop"; }
trap save USR1
python train.py &
wait
