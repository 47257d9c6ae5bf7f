#!/bin/bash
#SBATCH --nodes=2
#SBATCH --signal=B:USR2@120

trap 'touch stop' USR2
exec srun --kill-on-bad-exit=1 python train.py
