#!/bin/bash
#SBATCH -N2 --gpus-per-node=4 --cpus-per-gpu=8 --ntasks-per-node=4

image=$PWD/train.sif
srun apptainer exec --nv --bind "$SCRATCH" "$image" \
    bash -c 'export RANK=$SLURM_PROCID; python train.py'
