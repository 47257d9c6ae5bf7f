#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntask-per-node=4

srun hostname
