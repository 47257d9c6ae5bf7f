#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-node=4

exec hpctrain run train.py
