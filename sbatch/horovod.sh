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
# The global batch can be cut into equal parts for 8, 6, 4 and 2 ranks; the script's --elastic lets
# a run go on with another number of them. --no-kill is what lets the job outlive the loss of a
# host, unless it is the first one. It saves and is requeued when its time ends or its hosts are
# taken away.
#
#SBATCH --job-name=horovod
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --no-kill

set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT
trap '' USR2 # until hpctrain run handles it

: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true
[ ! -r .venv/bin/activate ] || . .venv/bin/activate

exec hpctrain run --elastic examples/mnist.py --elastic \
    --data digits --global-batch 240 --lr 0.003 --epochs 20 \
    --checkpoint-every 50 --backend horovod "$@"
