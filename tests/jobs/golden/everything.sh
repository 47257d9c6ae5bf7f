#!/bin/bash
# Everything at once.
#
# Two paragraphs.
#
#SBATCH --job-name="every thing"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=a100:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu
#SBATCH --account=abc
#SBATCH --qos=normal
#SBATCH --constraint="a100&nvlink"
#SBATCH --exclude="node[7-8]"
#SBATCH --dependency=afterok:123
#SBATCH --array=1,3,7%2
#SBATCH --output=logs/%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --hint=nomultithread
#SBATCH --comment="a \"comment\""
#SBATCH --mail-user=ada@example.org
#SBATCH --mail-type=END,FAIL,REQUEUE

set -e
ended() { echo "ended before hpctrain run, code $1"; exit $(($1 ? $1 : 2)); }
trap 'ended $?' EXIT
trap '' USR1 # until hpctrain run handles it

: "${HPCTRAIN_SITE:=$HOME/.config/hpctrain/site.sh}" # settings for all jobs on this cluster
# shellcheck source=/dev/null
[ ! -r "$HPCTRAIN_SITE" ] || . "$HPCTRAIN_SITE" || true
for file in /etc/profile.d/{z00_lmod,lmod,modules}.sh /usr/share/{lmod/,}modules/init/bash; do
    # shellcheck source=/dev/null
    [ ! -r "$file" ] || type module >/dev/null 2>&1 || . "$file" || true
done
module load gcc/12 || exit 2
module load cuda || exit 2
ulimit -n 65536
. './my env'/bin/activate || exit 2
export NCCL_DEBUG=INFO
export GREETING='it'"'"'s me'

exec hpctrain run --run-dir 'my runs/one' --stage-code . \
    --finish $'date\ndu -sh \'my runs\'' --max-restarts 5 train.py \
    --data 'my data' --lr 0.1 --backend ddp "$@"
