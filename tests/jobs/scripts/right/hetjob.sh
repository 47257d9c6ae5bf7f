#!/bin/bash
#SBATCH --job-name=actors
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=4 --cpus-per-task=8
#SBATCH hetjob
#SBATCH --nodes=4 --ntasks-per-node=32 --cpus-per-task=1

srun --het-group=0 python learner.py : --het-group=1 python actor.py
