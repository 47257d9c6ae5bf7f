#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8
#SBATCH --signal=B:USR2@120

. .venv/bin/activate
hpctrain run train.py --epochs 90
