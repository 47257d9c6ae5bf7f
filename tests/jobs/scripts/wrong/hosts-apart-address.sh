#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR=127.0.0.1
srun --kill-on-bad-exit=1 python train.py
