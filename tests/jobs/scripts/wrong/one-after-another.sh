#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
for i in "${!nodes[@]}"; do
    srun --nodes=1 --ntasks=1 -w "${nodes[$i]}" torchrun --nnodes=2 --nproc-per-node=4 \
        --node_rank="$i" --master_addr="${nodes[0]}" --master_port=$((20000 + SLURM_JOB_ID % 10000)) train.py
done
wait
