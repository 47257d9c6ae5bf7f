#!/bin/bash
set -e

: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true
. ./.venv/bin/activate || exit 2

exec hpctrain run --nodes 2 --nproc-per-node 2 --run-dir runs/one train.py \
    --data 'my data' --lr 0.1 "$@"
