#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --gpus=4 --cpus-per-task=8

srun --cpus-per-task=8 --export=ALL,DEVICES=0,1,2,3 python train.py
