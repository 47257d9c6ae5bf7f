#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --kill-on-bad-exit=1 hpctrain run train.py --epochs 90
srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpus-per-task=32 \
    hpctrain run --nproc-per-node 4 -m package.train
