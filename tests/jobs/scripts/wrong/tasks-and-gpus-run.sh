#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-node=4 --cpus-per-gpu=8

exec hpctrain run train.py
