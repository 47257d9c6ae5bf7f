#!/bin/bash
# Trains examples/mnist.py on four hosts, one rank each. From the top of the repository:
#
#     sbatch sbatch/mnist.sh
#     sbatch sbatch/mnist.sh --epochs 5 --lr 0.002        (options of the example)
#
# It asks for no GPU. With four GPUs on each host:
#
#     sbatch --gpus-per-node=4 --ntasks-per-node=4 sbatch/mnist.sh
#
# It saves and is requeued when its time ends or its hosts are taken away, as preemptible.sh says.
#
#SBATCH --job-name=mnist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --signal=B:USR2@60
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append

set -euo pipefail

# Slurm runs a copy of this file, from its spool: only the submit directory is the user's.
cd "$SLURM_SUBMIT_DIR"

python=${HPCTRAIN_PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi
fi

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# srun does not take over --cpus-per-task from sbatch in every version of Slurm, and without
# --kill-on-bad-exit the ranks that are left wait for a dead one.
. sbatch/preemptible.sh srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    "$python" examples/mnist.py --data fashion-mnist --global-batch 256 --lr 0.002 --epochs 2 "$@"
