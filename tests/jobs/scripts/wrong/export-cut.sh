#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --export=ALL,LAYERS=64,128,256

python train.py --layers "$LAYERS"
