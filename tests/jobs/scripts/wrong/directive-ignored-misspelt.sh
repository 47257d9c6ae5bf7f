#!/bin/bash
#SBATCH --ntasks=1
#SBACTH --time=24:00:00

python train.py
