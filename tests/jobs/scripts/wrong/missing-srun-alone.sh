#!/bin/bash
#SBATCH -N 2
#SBATCH --ntasks-per-node=1

torchrun --nproc-per-node 2 plain.py
