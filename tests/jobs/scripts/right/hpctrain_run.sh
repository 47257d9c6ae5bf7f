#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=20:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue

set -e
trap 'echo "ended before hpctrain run"' EXIT
trap '' USR2 # until hpctrain run handles it
export MASTER_PORT=29500 # for older programs
. .venv/bin/activate
exec hpctrain run --max-restarts 5 train.py --epochs 90 "$@"
