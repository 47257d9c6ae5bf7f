#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --time=4:00:00

conda activate train
python train.py
