#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --comment="half a quote

srun hostname
