#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --gpus=2 --cpus-per-task=16

source .venv/bin/activate
torchrun --nproc-per-node=2 --master-port 29500 train.py
