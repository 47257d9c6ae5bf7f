#!/bin/bash
# Trains examples/mnist.py with Horovod on four hosts, two ranks each, started by srun: no ssh, no
# MPI. When a host is lost, the run goes on with the others. From the top of the repository:
#
#     sbatch sbatch/horovod.sh
#     sbatch sbatch/horovod.sh --epochs 5 --lr 0.002        (options of the example)
#
# It asks for no GPU. With four GPUs on each host:
#
#     sbatch --gpus-per-node=4 --ntasks-per-node=4 sbatch/horovod.sh
#
# Over ssh, where horovodrun may do that:
#
#     HPCTRAIN_START_BY=horovodrun sbatch sbatch/horovod.sh
#
# --no-kill is what lets the job outlive the loss of a host, unless it is the first one. It saves and
# is requeued when its time ends or its hosts are taken away, as preemptible.sh says.
#
#SBATCH --job-name=horovod
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --no-kill
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

export HPCTRAIN_RUN=${HPCTRAIN_RUN:-$PWD/runs/mnist-$SLURM_JOB_ID}
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# Each start of the ranks is an `srun --kill-on-bad-exit=1 --cpus-per-task=…` on the hosts that are
# left, with a secret that no other user of the hosts knows. Rank 0's verdict decides how it ended,
# and after three starts in a row without a new checkpoint the run is given up (exit code 76).
launch=("$python" -m hpctrain run --elastic)
if [ "${HPCTRAIN_START_BY:-srun}" = horovodrun ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
    launch+=(--hosts "$hosts" --nproc-per-node "${SLURM_NTASKS_PER_NODE:-1}")
fi

# The global batch can be cut into equal parts for 8, 6, 4 and 2 ranks; --elastic lets a run go on
# with another number of them.
. sbatch/preemptible.sh "${launch[@]}" examples/mnist.py --backend horovod --elastic \
    --data fashion-mnist --global-batch 240 --lr 0.002 --epochs 2 --checkpoint-every 50 "$@"
