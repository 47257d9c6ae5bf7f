#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1

NNODES=1
export OMP_NUM_THREADS=4
srun --kill-on-bad-exit=1 \
    bash -c "python -m torch.distributed.run --nnodes=$NNODES --nproc_per_node=4 train.py"
