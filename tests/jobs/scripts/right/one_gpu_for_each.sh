#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:4

for gpu in 0 1 2 3; do
    CUDA_VISIBLE_DEVICES=$gpu python one_gpu.py --epochs "$gpu" &
done
wait
