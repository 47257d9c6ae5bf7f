#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1

head=$(hostname)
port=$((20000 + SLURM_JOB_ID % 10000))
for ((i = 0; i < SLURM_NNODES; i++)); do
    srun -N1 -n1 --relative=$i accelerate launch --num_machines 4 --num_processes 16 \
        --machine_rank $i --main_process_ip "$head" --main_process_port $port train.py
done
