#!/bin/bash
#SBATCH --gres=gpu:a100:4 --time=8:00:00

torchrun --standalone --nproc-per-node=4 train.py
