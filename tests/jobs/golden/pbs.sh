#!/bin/bash
# Anywhere.
#
#PBS -N train
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=4:mem=64gb
#PBS -l place=scatter
#PBS -j oe
#PBS -V
#PBS -l walltime=36:00:00
#PBS -q gpu
#PBS -A abc
#PBS -W depend=afterok:123
#PBS -J 0-10:2%2
#PBS -r y

set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT

cd "$PBS_O_WORKDIR"

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
