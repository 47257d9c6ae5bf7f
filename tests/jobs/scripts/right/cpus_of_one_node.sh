#!/bin/bash
#SBATCH --ntasks-per-node=16
#SBATCH --nodes=1
#SBATCH --time=60
#SBATCH --mem=0

export CUDA_VISIBLE_DEVICES=""
export HF_TOKEN=$(<"$HOME/.hf_token")
export WANDB_API_KEY=${WANDB_API_KEY:-}
python preprocess.py --workers $SLURM_NTASKS
exec python analyse.py
