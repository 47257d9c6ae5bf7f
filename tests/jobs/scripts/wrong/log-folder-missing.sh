#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --output=logs/%x-%j.log

mkdir -p logs
python train.py
