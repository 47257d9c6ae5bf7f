#!/bin/bash
#SBATCH --ntasks=1

export HPCTRAIN_SECRET=squeamish-ossifrage
python train.py
