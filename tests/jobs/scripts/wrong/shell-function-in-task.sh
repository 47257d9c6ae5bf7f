#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2

source ~/miniconda3/etc/profile.d/conda.sh
conda activate base
srun --kill-on-bad-exit=1 bash -c 'conda activate train && python train.py --rank $SLURM_PROCID'
