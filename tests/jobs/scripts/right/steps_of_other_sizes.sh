#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --export=ALL,MODE=train

srun --nodes=4 --ntasks-per-node=1 -c 1 cp data.tar "$TMPDIR"
srun -N 1 -n 1 -c 8 python prepare.py
time srun -l -K1 --cpus-per-task=8 --gpu-bind=none python train.py
srun -n1 -N1 -c8 torchrun --standalone --nproc-per-node=gpu evaluate.py
