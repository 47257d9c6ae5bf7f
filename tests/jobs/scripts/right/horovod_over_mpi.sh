#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4
#SBATCH --gpus-per-node=4 --cpus-per-gpu=8

srun -K --mpi=pmix python with_horovod.py
horovodrun -np 8 -H "$(scontrol show hostnames | sed 's/$/:4/' | paste -sd,)" python with_horovod.py
srun -K hpctrain run with_horovod.py
