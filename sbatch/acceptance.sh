#!/bin/bash
# What a site runs once: are these hosts fit, and does a training survive on them? One page of pass
# and fail to keep, acceptance-JOBID.txt in the submit directory. From the top of the repository:
#
#     sbatch sbatch/acceptance.sh
#
# It asks for two hosts and no GPU. With four GPUs on each host:
#
#     sbatch --gpus-per-node=4 --ntasks-per-node=4 sbatch/acceptance.sh
#
# The last check requeues the job, once; Slurm starts it again by itself. docs/acceptance.md has a
# page, line by line.
#
#SBATCH --job-name=acceptance
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue

set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT

: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true
[ ! -r .venv/bin/activate ] || . .venv/bin/activate

exec hpctrain run --once -- bash sbatch/acceptance/checks.sh "$@"
