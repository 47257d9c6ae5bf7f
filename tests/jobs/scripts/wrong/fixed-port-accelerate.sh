#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --gpus=4
#SBATCH --cpus-per-task=32

accelerate launch --num_processes 4 --main_process_port=29501 train.py
