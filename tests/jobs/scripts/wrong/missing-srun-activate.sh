#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

source activate train
python train.py --epochs 90
