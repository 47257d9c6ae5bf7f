#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4

step=(srun --label
    --cpu-bind=cores)
"${step[@]}" python -u train.py "$@"
