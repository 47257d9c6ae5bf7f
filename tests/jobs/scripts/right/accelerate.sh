#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1     # crucial: one launcher a node
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32

GPUS_PER_NODE=4
NNODES=$SLURM_NNODES
NUM_PROCESSES=$(expr $NNODES \* $GPUS_PER_NODE)
export CMD="train.py --config config.yaml"
srun --cpus-per-task=$SLURM_CPUS_PER_TASK --kill-on-bad-exit=1 bash -c "accelerate launch \
    --num_processes $NUM_PROCESSES --num_machines $NNODES \
    --machine_rank \$SLURM_PROCID $CMD"
