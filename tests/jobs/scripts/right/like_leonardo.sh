#!/bin/bash
#SBATCH --partition=boost_usr_prod --qos=normal
#SBATCH --nodes=2 --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32

module load python/3.11 cuda
source $WORK/env/bin/activate
nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))
head=${nodes[0]}
worker=$((SLURM_JOB_NUM_NODES - 1))
for ((i = 0; i <= worker; i++)); do
    srun -N 1 -n 1 -c 32 -w "${nodes[$i]}" torchrun --nnodes 2 --nproc_per_node 4 \
        --node_rank $i --master_addr $head --master_port 29501 train.py &
done
wait
for node in "${nodes[@]}"; do
    srun -N 1 -n 1 -c 32 -w "$node" tar -xf data.tar -C "$TMPDIR"
done
