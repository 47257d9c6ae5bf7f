#!/bin/bash
#SBATCH --nodes=2
#SBATCH --signal=B:USR2@120

trap '' USR2
python -m hpctrain run --once -- srun --kill-on-bad-exit=1 ./train | tee train.out
