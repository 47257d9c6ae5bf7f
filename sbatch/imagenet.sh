#!/bin/bash
# Trains ResNet-50 on ImageNet on two hosts with four GPUs each. The recipe's values are published
# ones, but it was never run to its end: tests take one epoch of a small model over photographs, on
# CPUs. From the top of the repository, with the images of docs/imagenet.md in
# data/imagenet:
#
#     sbatch sbatch/imagenet.sh
#     sbatch sbatch/imagenet.sh --data /datasets/imagenet --epochs 100  (options of the example)
#     sbatch sbatch/imagenet.sh --recipe examples/recipes/resnet50-modern.toml
#
# On four such hosts:
#
#     sbatch --nodes=4 sbatch/imagenet.sh
#
# A trial on one host of any cluster, without GPUs and without images:
#
#     sbatch --nodes=1 --gpus-per-node=0 --cpus-per-task=1 sbatch/imagenet.sh \
#         --data synthetic --model resnet18 --global-batch 32 --max-steps 20 --lr-warmup-epochs 0
#
# It saves and is requeued when its time ends or its hosts are taken away, for as often as it takes.
#
#SBATCH --job-name=imagenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=14
#SBATCH --time=20:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@300
#SBATCH --requeue

set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT
trap '' USR2 # until hpctrain run handles it

: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true
[ ! -r .venv/bin/activate ] || . .venv/bin/activate

exec hpctrain run examples/imagenet.py --data data/imagenet \
    --recipe examples/recipes/resnet50-90.toml --checkpoint-minutes 20 "$@"
