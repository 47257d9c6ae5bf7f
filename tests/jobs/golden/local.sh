#!/bin/bash
set -euo pipefail

command=(
    python -m hpctrain run --nodes 2 --nproc-per-node 2 train.py --data 'my data' --lr 0.1 "$@"
)

# Settings for all jobs on this cluster. Such files often fail with -e and -u.
site=${HPCTRAIN_SITE:-${HOME:-}/.config/hpctrain/site.sh}
if [ -n "${HPCTRAIN_SITE:-}" ] || [ -e "$site" ]; then
    case $site in */*) ;; *) site=./$site ;; esac # or the dot command searches the PATH
    code=0
    set +eu
    trap 'echo "$site calls exit, which ends the job; it may use return" >&2; exit 2' EXIT
    # shellcheck source=/dev/null
    . "$site" || code=$?
    trap - EXIT
    set -eu
    if [ "$code" != 0 ]; then echo "$site ended with $code" >&2; fi
fi

venv=./.venv
if [ ! -r "$venv/bin/activate" ]; then
    printf '%s: no virtual environment on %s, seen from %s\n' "$venv" "$HOSTNAME" "$PWD" >&2
    exit 2
fi
# shellcheck source=/dev/null
. "$venv/bin/activate"

run=$PWD/runs/one
export HPCTRAIN_RUN_DIR=${HPCTRAIN_RUN_DIR:-$run}

exec "${command[@]}"
