#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

head=$(hostname)
launcher="accelerate launch --num_machines 2 --num_processes 8 --machine_rank \$SLURM_PROCID --main_process_ip $head"
srun --kill-on-bad-exit=1 $launcher train.py
