#!/usr/bin/env bash
#SBATCH -n 4 -N 2
#SBATCH -c2 -t10:00 -J'short forms'
#SBATCH -o short-%j.txt --open-mode=append

step=(srun --kill-on-bad-exit=1)
step+=(-c "$SLURM_CPUS_PER_TASK")
"${step[@]}" python -u train.py && echo done >"done-$SLURM_JOB_ID"
