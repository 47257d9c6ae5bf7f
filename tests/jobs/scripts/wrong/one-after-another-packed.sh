#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

for fold in 0 1 2 3; do
    srun --exact --ntasks=1 --gpus=1 --mem=40G python train.py --fold "$fold" > "fold$fold.log"
done
wait
