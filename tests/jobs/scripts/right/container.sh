#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8 --cpus-per-gpu=8
#SBATCH --container-image=nvcr.io/nvidia/pytorch:24.10-py3
#SBATCH --container-mounts=/data:/data
#SBATCH --uenv=pytorch/v2.6.0:v1 --view default
#SBATCH --comment "no # comment"

{
    date; hostname
} > info.txt
srun --kill-on-bad-exit=1 --mpi=pmix \
    --container-mount-home bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python /data/train.py
' 2>&1 | tee "log-$SLURM_JOB_ID.txt"
