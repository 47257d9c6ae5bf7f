#!/bin/bash
# Tries six settings of examples/mnist.py, each a task of an array, at most two at once. From the
# top of the repository:
#
#     sbatch sbatch/sweep.sh
#     sbatch --array=0,4 sbatch/sweep.sh --epochs 5          (two of them, with an option more)
#
# It asks for no GPU. With one GPU for each setting:
#
#     sbatch --gpus-per-node=1 sbatch/sweep.sh
#
# Each setting is saved and requeued by itself.
#
#SBATCH --job-name=sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:15:00
#SBATCH --array=0-5%2
#SBATCH --output=%x-%A_%a.log
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

exec hpctrain run --setting='--lr 0.0005 --seed 1' --setting='--lr 0.0005 --seed 2' \
    --setting='--lr 0.002 --seed 1' --setting='--lr 0.002 --seed 2' \
    --setting='--lr 0.008 --seed 1' --setting='--lr 0.008 --seed 2' examples/mnist.py \
    --data digits --global-batch 64 --epochs 3 "$@"
