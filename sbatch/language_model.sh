#!/bin/bash
# Trains a GPT of 85 million parameters, divided over the four GPUs of one host (--backend fsdp), on
# the documentation of this repository. Never run on GPUs: a test takes a small model through it, on
# CPUs. From the top of the repository:
#
#     sbatch sbatch/language_model.sh
#     sbatch sbatch/language_model.sh --data text.txt --max-steps 20000   (options of the example)
#
# It saves and is requeued when its time ends or its hosts are taken away.
#
#SBATCH --job-name=language_model
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

exec hpctrain run examples/language_model.py --backend fsdp \
    --precision bf16 --context 256 --width 768 --layers 12 \
    --lr 3e-4 --lr-end 3e-5 --warmup 100 --max-steps 2000 "$@"
