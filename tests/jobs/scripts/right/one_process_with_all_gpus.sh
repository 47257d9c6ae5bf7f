#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:4

eval "$(conda shell.bash hook)"
conda activate train
python data_parallel.py
