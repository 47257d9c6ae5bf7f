#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

rank=0
for host in $(scontrol show hostnames); do
    ssh "$host" "cd $PWD && torchrun --nnodes 2 --nproc-per-node 4 --node-rank $rank --master-addr $(hostname) train.py"
    rank=$((rank + 1))
done
