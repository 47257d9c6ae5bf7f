#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
head=$(hostname)
srun --kill-on-bad-exit=1 bash -c "accelerate launch --num_machines 2 --num_processes 4 \
    --machine_rank \$SLURM_NODEID --main_process_ip $head --main_process_port $((20000 + SLURM_JOB_ID % 10000)) train.py"
