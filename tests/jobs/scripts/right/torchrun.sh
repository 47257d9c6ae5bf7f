#!/bin/bash
#SBATCH -J multinode -N 2 -t 0-04:00 -p gpu
#SBATCH --ntasks-per-node=1 --gpus-per-node=a100:8 -c 64
#SBATCH -o %x-%j.out -e %x-%j.err

nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
nodes_array=("${nodes[@]}")
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)

echo Node IP: $head_node_ip
export LOGLEVEL=INFO

LAUNCHER="torchrun \
    --nnodes 2 \
    --nproc_per_node 8 \
    --rdzv_id $SLURM_JOB_ID \
    --rdzv_backend c10d \
    --rdzv_endpoint $head_node_ip:$((20000 + SLURM_JOB_ID % 10000))"
SRUN_ARGS=" \
    --wait=60 \
    --kill-on-bad-exit=1 \
    --cpus-per-task=64 \
    "
srun $SRUN_ARGS $LAUNCHER train.py 50 10
