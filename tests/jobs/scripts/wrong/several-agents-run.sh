#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-gpu=8

srun --kill-on-bad-exit=1 hpctrain run --nproc-per-node=4 train.py
