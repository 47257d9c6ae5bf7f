#!/bin/bash
#SBATCH -C gpu
#SBATCH --nodes=4 --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --image=registry/pytorch:25.02
#SBATCH --module=gpu,nccl-plugin

export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export MASTER_PORT=29500
srun --cpus-per-task=32 --kill-on-bad-exit=1 shifter \
    bash -c "
    export RANK=\$SLURM_PROCID
    export LOCAL_RANK=\$SLURM_LOCALID
    export WORLD_SIZE=\$SLURM_NTASKS
    python train.py
    "
srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 -c 128 --wait=60 bash -c '
    torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 --rdzv-backend=c10d \
        --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py'
