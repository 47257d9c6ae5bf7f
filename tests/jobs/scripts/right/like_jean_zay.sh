#!/bin/bash
#SBATCH --job-name=distributed
#SBATCH --nodes=3
#SBATCH --gres=gpu:4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=40
#SBATCH --hint=nomultithread

set -x
source $WORK/start-prod
conda activate train
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=6000
GPUS_PER_NODE=4
export CMD=" \
    $(pwd)/pretrain.py \
    --tensor-model-parallel-size 2 \
    "
export LAUNCHER="python -u -m torch.distributed.launch \
    --nproc_per_node $GPUS_PER_NODE --nnodes $SLURM_NNODES \
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT \
    "
srun -c 40 --kill-on-bad-exit=1 bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'
srun -c 40 --kill-on-bad-exit=1 bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
