#!/bin/bash
#SBATCH --ntasks=1

cd "$(dirname "$0")"
python train.py
