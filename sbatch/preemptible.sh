#!/bin/bash
# Runs a training that is stopped, saved and requeued by itself, for as often as it takes:
#
#     sbatch --nodes=4 --ntasks-per-node=4 sbatch/preemptible.sh \
#         srun --kill-on-bad-exit=1 python train.py --epochs 90
#
# What follows the script's name is the command that starts all ranks, by srun, torchrun, mpirun or
# `hpctrain run`. docs/preemption.md says why the lines are what they are.
#
#SBATCH --job-name=preemptible
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

exec hpctrain run --once -- "$@"
