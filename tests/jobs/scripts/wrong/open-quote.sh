#!/bin/bash
#SBATCH --ntasks=1

python train.py --name "it's" --note "half a quote
python evaluate.py
