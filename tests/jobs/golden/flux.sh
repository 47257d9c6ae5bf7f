#!/bin/bash
# Anywhere.
#
#flux: --job-name=train
#flux: --nodes=2
#flux: --nslots=8
#flux: --cores-per-slot=8
#flux: --gpus-per-slot=1
#flux: --time-limit=129600s
#flux: --queue=gpu
#flux: --bank=abc
#flux: --dependency=afterok:123
#flux: --output=train-{{id}}.log
#flux: --exclusive
#flux: -o gpu-affinity=off

set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT

: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true
for file in /etc/profile.d/{z00_lmod,lmod,modules}.sh /usr/share/{lmod/,}modules/init/bash; do
    # shellcheck source=/dev/null
    [ ! -r "$file" ] || type module >/dev/null 2>&1 || . "$file" || true
done
module load gcc/12 || exit 2
. './my env'/bin/activate || exit 2
export GREETING='it'"'"'s me'

exec timeout --foreground --preserve-status --signal=USR1 \
    $((129300 > SECONDS ? 129300 - SECONDS : 1)) hpctrain run \
    --nproc-per-node 4 --run-dir 'my runs/one' train.py \
    --data 'my data' --lr 0.1 "$@"
