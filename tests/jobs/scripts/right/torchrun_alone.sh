#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

export MASTER_ADDR=localhost
srun --nodes=1 --ntasks=1 torchrun --standalone --nproc-per-node=4 prepare.py
# Another seed on each host, which is meant.
srun --kill-on-bad-exit=1 bash -c 'torchrun --standalone train.py --seed "$SLURM_NODEID"'
for host in $(scontrol show hostnames); do
    srun -K -w "$host" torchrun --nproc-per-node=4 evaluate.py "$host" &
done
wait
