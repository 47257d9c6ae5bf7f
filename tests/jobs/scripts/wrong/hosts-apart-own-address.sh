#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=1 bash -c '
    export MASTER_ADDR=$(hostname) RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
    python train.py
'
