#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=2 --cpus-per-gpu=8

export CUDA_VISIBLE_DEVICES=2,3
torchrun --standalone --nproc-per-node=2 train.py
