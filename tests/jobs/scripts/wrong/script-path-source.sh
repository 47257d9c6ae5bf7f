#!/bin/bash
#SBATCH --ntasks=1

here=${BASH_SOURCE[0]%/*}
source "$here/setup.bash"
python train.py
