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
# It saves and is requeued when its time ends or its hosts are taken away.
#
#SBATCH --job-name=mnist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue

set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT
trap '' USR2 # until hpctrain run handles it

: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true
[ ! -r .venv/bin/activate ] || . .venv/bin/activate

exec hpctrain run examples/mnist.py --data digits --global-batch 64 --lr 0.003 --epochs 20 "$@"
