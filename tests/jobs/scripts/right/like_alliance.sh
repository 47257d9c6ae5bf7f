#!/bin/bash
#SBATCH --nodes 2
#SBATCH --gpus-per-node=2
#SBATCH --tasks-per-node=2
#SBATCH --cpus-per-task=6
#SBATCH --mem=32G
#SBATCH --time=0-03:00
#SBATCH --output=%N-%j.out

module load python
srun --ntasks $SLURM_NNODES --tasks-per-node=1 -c 1 bash << EOF
virtualenv --no-download $SLURM_TMPDIR/env
source $SLURM_TMPDIR/env/bin/activate
pip install --no-index torch
EOF
source $SLURM_TMPDIR/env/bin/activate
export NCCL_ASYNC_ERROR_HANDLING=1
export MASTER_ADDR=$(hostname)
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
echo "r$SLURM_NODEID master: $MASTER_ADDR"
srun --kill-on-bad-exit=1 python train.py --init_method tcp://$MASTER_ADDR:3456 \
    --world_size $((SLURM_NTASKS_PER_NODE * SLURM_JOB_NUM_NODES)) --batch_size 256
