#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --signal=B:USR2@120
#SBATCH --requeue --open-mode=append

exec hpctrain run --once -- srun --kill-on-bad-exit=1 python train.py
