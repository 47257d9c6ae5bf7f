#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8
#SBATCH --time=01:00:00

module load cuda
source ~/venvs/train/bin/activate

python train.py --epochs 90 --data "$SCRATCH/imagenet"
