#!/bin/bash
# Anywhere.
#
#BSUB -J "train[1-6,9]%2"
#BSUB -n 64
#BSUB -R "span[ptile=32]"
#BSUB -gpu "num=4"
#BSUB -R "rusage[mem=64G/host]"
#BSUB -W 36:00
#BSUB -q gpu
#BSUB -P abc
#BSUB -w "done(123)"
#BSUB -o logs/train-%J.log
#BSUB -r

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
    --nproc-per-node 4 train.py --data 'my data' --lr 0.1 "$@"
