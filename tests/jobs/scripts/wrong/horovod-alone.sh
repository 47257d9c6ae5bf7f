#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

source ~/venvs/horovod/bin/activate
srun --kill-on-bad-exit=1 python with_horovod.py
