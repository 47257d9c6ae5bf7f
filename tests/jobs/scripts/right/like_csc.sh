#!/bin/bash
#SBATCH --account=project_1
#SBATCH --partition=gpumedium
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --cpus-per-task=128
#SBATCH --gres=gpu:a100:4
#SBATCH --time=1:00:00

module purge
module load pytorch
export RDZV_HOST=$(hostname)
export RDZV_PORT=29400

srun --cpus-per-task=$SLURM_CPUS_PER_TASK --kill-on-bad-exit=1 torchrun \
    --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=4 \
    --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d \
    --rdzv_endpoint="$RDZV_HOST:$RDZV_PORT" \
    train.py --epochs 10
