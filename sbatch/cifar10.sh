#!/bin/bash
# Trains ResNet-18 on CIFAR-10 with the four GPUs of one host. The example's values are published
# ones, but it was never run to its end: a test takes two steps over made-up images, on a CPU. From
# the top of the repository, with the original files (cifar-10-batches-py) in data/cifar10:
#
#     sbatch sbatch/cifar10.sh
#     sbatch sbatch/cifar10.sh --data /datasets/cifar10 --model resnet50   (options of the example)
#
# On two such hosts:
#
#     sbatch --nodes=2 sbatch/cifar10.sh
#
# It saves and is requeued when its time ends or its hosts are taken away.
#
#SBATCH --job-name=cifar10
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
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

exec hpctrain run examples/cifar10.py --data data/cifar10 --global-batch 128 --workers auto "$@"
