#!/bin/bash
#SBATCH --ntasks=2

for seed in 1 2; do
    srun --exact -n 1 python train.py --seed $seed &
done
