#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:v100:2
#SBATCH --cpus-per-task=20

export RDZV_HOST=$(hostname)
export RDZV_PORT=29400
srun --kill-on-bad-exit=1 --cpus-per-task=20 python3 -m torch.distributed.run --nnodes=$SLURM_JOB_NUM_NODES \
    --nproc_per_node=2 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d \
    --rdzv_endpoint="$RDZV_HOST:$RDZV_PORT" train.py
