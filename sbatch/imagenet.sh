#!/bin/bash
# Trains ResNet-50 on ImageNet on two hosts with four GPUs each. The recipe's values are published
# ones, but it was never run to its end: tests take one epoch of a small model over photographs, on
# CPUs. From the top of the repository, with the images or shards of docs/imagenet.md in
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

set -euo pipefail

# Slurm runs a copy of this file, from its spool: only the submit directory is the user's.
cd "$SLURM_SUBMIT_DIR"
# What follows the script's name on sbatch's line; no file that is read below gets to see it.
hpctrain_arguments=("$@")
set --

# USR2 comes before the end of the time, TERM where Slurm takes the hosts away.
hpctrain_asked=
trap 'hpctrain_asked=yes' USR2 TERM

# Of each rank, unless something below says otherwise; torch would take all CPUs of the host.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# What all jobs on this cluster need. Such files are not written for -e and -u.
site=${HPCTRAIN_SITE:-${HOME:-}/.config/hpctrain/site.sh}
if [ -n "${HPCTRAIN_SITE:-}" ] || [ -e "$site" ]; then
    case $site in */*) ;; *) site=./$site ;; esac # or the dot looks along the PATH
    code=0
    set +eu
    trap 'echo "$site has an exit, where return was meant: it ends the job" >&2; exit 2' EXIT
    # shellcheck source=/dev/null
    . "$site" || code=$?
    trap - EXIT
    set -eu
    if [ "$code" != 0 ]; then echo "$site ended with $code" >&2; fi
fi

# Lines of the job's own.
set +u
# shellcheck source=/dev/null
if [ -r .venv/bin/activate ]; then . .venv/bin/activate; fi
set -eu

# Where sbatch was called in another job, that one's variables came along. Slurm puts its own in
# their place only where it has some: not in a job that is no array, or was not requeued.
if [ -n "${SLURM_ARRAY_TASK_ID:-}${SLURM_RESTART_COUNT:-}" ] &&
    shown=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID "); then
    case ${shown%% JobName=*} in
    *\ ArrayTaskId=*) ;;
    *) unset "${!SLURM_ARRAY_@}" ;;
    esac
    count=$(sed -n 's/.* Restarts=\([0-9]*\) BatchFlag=.*/\1/p' <<<"$shown")
    SLURM_RESTART_COUNT=${count:-${SLURM_RESTART_COUNT:-0}}
fi
if [ -n "${HPCTRAIN_STOP_FILE:-}" ] && [ -n "${HPCTRAIN_RUN_DIR:-}" ]; then
    echo "not used: HPCTRAIN_RUN_DIR=$HPCTRAIN_RUN_DIR, of the job in which sbatch was called"
    unset HPCTRAIN_RUN_DIR
fi

# As Slurm's own tools call it; a requeue changes neither this nor the run directory.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}

command=(
    python examples/imagenet.py --data data/imagenet --recipe examples/recipes/resnet50-90.toml
    --checkpoint-minutes 20 "${hpctrain_arguments[@]}"
)

# One that was given goes on: HPCTRAIN_RUN_DIR=runs/NAME-JOB sbatch …
if [ -n "${HPCTRAIN_RUN_DIR:-}" ] && [ "${SLURM_ARRAY_TASK_COUNT:-1}" -gt 1 ]; then
    echo "HPCTRAIN_RUN_DIR=$HPCTRAIN_RUN_DIR: one directory, $SLURM_ARRAY_TASK_COUNT tasks" >&2
    exit 2
fi
run=$SLURM_SUBMIT_DIR/runs/${SLURM_JOB_NAME//\//_}-$job
HPCTRAIN_RUN_DIR=${HPCTRAIN_RUN_DIR:-$run}
case $HPCTRAIN_RUN_DIR in /*) ;; *) HPCTRAIN_RUN_DIR=$SLURM_SUBMIT_DIR/$HPCTRAIN_RUN_DIR ;; esac
export HPCTRAIN_RUN_DIR
mkdir -p -- "$HPCTRAIN_RUN_DIR"

# Two files on the file system that all hosts share, new for each start. This script makes the stop
# file, which asks the ranks to save and to leave. Rank 0 writes the exit status before they do, as
# the exit code of a launcher depends on which rank left first.
runs=$SLURM_SUBMIT_DIR/runs
mkdir -p "$runs"
export HPCTRAIN_STOP_FILE=$runs/.stop-$job-${SLURM_RESTART_COUNT:-0}
export HPCTRAIN_EXIT_STATUS_FILE=$runs/.exit-status-$job-${SLURM_RESTART_COUNT:-0}
rm -f "$runs"/.stop-"$job"-* "$runs"/.exit-status-"$job"-*

# Without it another user of the hosts who guesses the job's number could join the ranks.
HPCTRAIN_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export HPCTRAIN_SECRET

trap 'touch "$HPCTRAIN_STOP_FILE"' USR2 TERM
if [ -n "$hpctrain_asked" ]; then touch "$HPCTRAIN_STOP_FILE"; fi

# srun does not take over --cpus-per-task from sbatch in every version of Slurm, and without
# --kill-on-bad-exit the ranks that are left wait for a dead one.
launch=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")

printf 'job %s, start %s, on %s:%s\n' "$job" "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" \
    "$(printf ' %q' "${launch[@]}" "${command[@]}")"
# In the background: bash runs no trap while it waits for a command in front.
"${launch[@]}" "${command[@]}" &
ranks=$!
# A signal ends `wait`, and not the ranks.
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks" || true; done
code=0
wait "$ranks" || code=$?

if [ -s "$HPCTRAIN_EXIT_STATUS_FILE" ]; then
    said=$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$HPCTRAIN_EXIT_STATUS_FILE")
    # 0 does not cover what a rank did after its session; a file that is cut off is not used.
    if [ "${said:-0}" != 0 ]; then code=$said; fi
elif [ "$code" != 0 ] && [ -e "$HPCTRAIN_STOP_FILE" ]; then
    code=75 # stopped before the first step
elif [ "$code" = $((128 + $(kill -l USR1))) ] || [ "$code" = $((128 + $(kill -l USR2))) ]; then
    code=75 # the same, by a signal to the ranks while they still imported
fi
trap '' USR2
trap - TERM
rm -f "$HPCTRAIN_STOP_FILE" "$HPCTRAIN_EXIT_STATUS_FILE"
# Done, failed, or given up (76): the end.
if [ "$code" != 75 ]; then exit "$code"; fi

# Stopped. A cancelled job would come back to life, and one that Slurm has taken away for another
# it requeues itself: both are no longer RUNNING (or SIGNALING, while a signal is under way).
if shown=$(scontrol show job --oneliner "$job" 2>&1); then
    state=$(sed -n "s/^JobId=$SLURM_JOB_ID .* JobState=\([A-Z_]*\) Reason=.*/\1/p" <<<"$shown")
    if [ "$state" != RUNNING ] && [ "$state" != SIGNALING ]; then
        echo "job $job is ${state:-not this one}: not requeued from here"
        echo "its checkpoints are in $HPCTRAIN_RUN_DIR"
        exit 75
    fi
    # Last of all, as it ends this script. One that was cancelled just now is complete.
    if shown=$(scontrol requeue incomplete "$job" 2>&1); then
        sleep 60
        shown="scontrol requeue was accepted, but the job goes on"
    fi
fi
echo "job $job was stopped and could not be requeued: $shown"
echo "its checkpoints are in $HPCTRAIN_RUN_DIR; to go on, with the options of sbatch that it had:"
# Slurm forgets it some minutes after the end.
script=$runs/job-$job.sh
if ! scontrol write batch_script "$SLURM_JOB_ID" "$script" >/dev/null 2>&1; then
    script=THE_SCRIPT
fi
words=$(printf ' %q' "$script" "${hpctrain_arguments[@]}")
echo "    HPCTRAIN_RUN_DIR=${HPCTRAIN_RUN_DIR@Q} sbatch$words --resume"
exit "$code"
