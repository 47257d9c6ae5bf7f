#!/bin/bash
#SBATCH --nodes=2 \
    --ntasks-per-node=4

srun hostname
