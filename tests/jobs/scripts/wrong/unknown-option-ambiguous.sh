#!/bin/bash
#SBATCH --node=1

srun hostname
