#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2

srun --kill-on-bad-exit=1 bash <<EOF
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
python train.py
EOF
