#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

horovodrun -np 8 python train.py --epochs 90
