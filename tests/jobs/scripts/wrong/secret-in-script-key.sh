#!/bin/bash
#SBATCH --ntasks=1

WANDB_API_KEY="0123456789abcdef0123456789abcdef" python train.py
