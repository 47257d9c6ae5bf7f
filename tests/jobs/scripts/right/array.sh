#!/bin/bash
#SBATCH --array=0-9%2
#SBATCH --output=sweep_%A_%a.out
#SBATCH --gpus=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=90

rates=(0.1 0.03 0.01 0.003 0.001)
rate=${rates[$((SLURM_ARRAY_TASK_ID % 5))]}
case $SLURM_ARRAY_TASK_ID in
    [0-4]) model=small ;;
    5 | 6 | 7) model=medium ;;
    (*) model=large ;;
esac
if [[ "$model" =~ ^(small|medium)$ && -z "${SLURM_RESTART_COUNT:-}" ]]; then
    extra="--fast"
fi
python train.py --lr "$rate" --model "$model" ${extra:-}
