#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

exec hpctrain run --once -- torchrun --nproc-per-node=4 train.py
