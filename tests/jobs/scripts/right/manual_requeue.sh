#!/bin/bash
#SBATCH --job-name=requeue
#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-gpu=8
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

handler() {
    echo "$(date) signal, requeue"
    scontrol requeue ${SLURM_JOB_ID}
}
trap 'handler' SIGUSR1

srun -K --gpu-bind=none python train.py --resume &
pid=$!
wait $pid
