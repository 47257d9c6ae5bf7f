#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue

set -euo pipefail

# Slurm runs a copy of this file, from its spool: only the submit directory is the user's.
cd "$SLURM_SUBMIT_DIR"
# Arguments after the script's name on sbatch's line, hidden from the files that are sourced below.
hpctrain_arguments=("$@")
set --

# Slurm sends USR2 before the end of the time limit, and TERM when it preempts the job.
hpctrain_signaled=
trap 'hpctrain_signaled=yes' USR2 TERM

# Default for each rank; lines below may change it. torch would use all CPUs of the host.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

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

# A job that was submitted inside another job inherits its variables. Slurm overwrites only some of
# them: array variables only in an array, and the restart count only after a requeue.
if [ -n "${SLURM_ARRAY_TASK_ID:-}${SLURM_RESTART_COUNT:-}" ] &&
    record=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID "); then
    case ${record%% JobName=*} in
    *\ ArrayTaskId=*) ;;
    *) unset "${!SLURM_ARRAY_@}" ;;
    esac
    count=$(sed -n 's/.* Restarts=\([0-9]*\) BatchFlag=.*/\1/p' <<<"$record")
    SLURM_RESTART_COUNT=${count:-${SLURM_RESTART_COUNT:-0}}
fi
if [ -n "${HPCTRAIN_STOP_FILE:-}" ] && [ -n "${HPCTRAIN_RUN_DIR:-}" ]; then
    echo "ignored: HPCTRAIN_RUN_DIR=$HPCTRAIN_RUN_DIR, of the job that called sbatch"
    unset HPCTRAIN_RUN_DIR
fi

# The job's label in Slurm's tools. A requeue changes neither the label nor the run directory.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}

command=(train.py --data 'my data' --lr 0.1 "${hpctrain_arguments[@]}")

# To continue a run: HPCTRAIN_RUN_DIR=runs/NAME-JOB sbatch …
if [ -n "${HPCTRAIN_RUN_DIR:-}" ] && [ "${SLURM_ARRAY_TASK_COUNT:-1}" -gt 1 ]; then
    echo "HPCTRAIN_RUN_DIR=$HPCTRAIN_RUN_DIR: one directory, $SLURM_ARRAY_TASK_COUNT tasks" >&2
    exit 2
fi
run=$SLURM_SUBMIT_DIR/runs/${SLURM_JOB_NAME//\//_}-$job
HPCTRAIN_RUN_DIR=${HPCTRAIN_RUN_DIR:-$run}
case $HPCTRAIN_RUN_DIR in /*) ;; *) HPCTRAIN_RUN_DIR=$SLURM_SUBMIT_DIR/$HPCTRAIN_RUN_DIR ;; esac
export HPCTRAIN_RUN_DIR
mkdir -p -- "$HPCTRAIN_RUN_DIR"

# Two files on the file system that all hosts share, new for each start. The stop file makes
# the ranks save and exit. Rank 0 writes the exit status before they exit, as the exit code of a
# launcher depends on which rank exits first.
runs=$SLURM_SUBMIT_DIR/runs
mkdir -p "$runs"
export HPCTRAIN_STOP_FILE=$runs/.stop-$job-${SLURM_RESTART_COUNT:-0}
export HPCTRAIN_EXIT_STATUS_FILE=$runs/.exit-status-$job-${SLURM_RESTART_COUNT:-0}
rm -f "$runs"/.stop-"$job"-* "$runs"/.exit-status-"$job"-*

# Without a secret, another user of the hosts could guess the job's number and join the ranks.
HPCTRAIN_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export HPCTRAIN_SECRET

trap 'touch "$HPCTRAIN_STOP_FILE"' USR2 TERM
if [ -n "$hpctrain_signaled" ]; then touch "$HPCTRAIN_STOP_FILE"; fi

# Each host copies code to its own disk, once for all of its ranks.
# All users can write in /tmp, so an existing folder of that name is refused.
scratch=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/hpctrain-${USER:-$UID}-$job-${SLURM_RESTART_COUNT:-0}
each_host=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"
    --ntasks-per-node=1 --cpus-per-task=1)
# A name does not show who created a folder: only folders with the mark of a start are removed.
start_mark=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
# shellcheck disable=SC2016 # for the other hosts' shells
host_functions='
is_marked() { [ -O "$1" ] && [ ! -L "$1" ] && [ -f "$1/.start" ]; }
remove() {
    chmod -R u+rwX -- "$1" # only root could remove a read-only folder
    rm -rf -- "$1"/*       # the mark is removed last, in case of a kill
    rm -rf -- "$1"
}'
remove_copies() {
    cd "$SLURM_SUBMIT_DIR"
    # shellcheck disable=SC2016 # for the other hosts' shells
    "${each_host[@]}" bash -c "$host_functions"'
        if is_marked "$1" && [ "$(cat "$1/.start")" = "$2" ]; then remove "$1"; fi
    ' remove "$scratch" "$start_mark" || true
}
trap remove_copies EXIT
# shellcheck disable=SC2016 # for the other hosts' shells
if ! "${each_host[@]}" --kill-on-bad-exit=1 bash -c "$host_functions"'
    set -euo pipefail
    umask 077
    for old in "${1%-*}"-*; do # of a start that was killed
        case ${old#"${1%-*}-"} in *[!0-9]* | "") continue ;; esac
        if [ "$old" != "$1" ] && is_marked "$old" && ! remove "$old"; then
            printf "%s is of an earlier start and cannot be removed\n" "$old" >&2
        fi
    done
    mkdir -- "$1"
    printf %s "$2" >"$1/.start"
    mkdir -- "$1/code"
    tar -C "$3" --exclude=./runs --exclude=./.git --exclude=./.venv -cf - . |
        tar -C "$1/code" -xf -
' stage "$scratch" "$start_mark" code ''; then
    echo "a host could not copy code to $scratch: see the messages above" >&2
    exit 1
fi
export HPCTRAIN_SCRATCH=$scratch

export NCCL_DEBUG=INFO
# These override the variables of the image.
export APPTAINERENV_NCCL_DEBUG="$NCCL_DEBUG"

# The ranks start where this shell is.
cd "$scratch/code"

# One agent on each host, with the CPUs of all its ranks. The rendezvous is on the first host, at a
# port that differs for each start. Without -- torchrun would read --run-dir as its own --run-path.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_host=${hosts%%$'\n'*}
ranks_of_host=${SLURM_NTASKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
port=$((10000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 10000))
launch=(srun --kill-on-bad-exit=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"
    --ntasks-per-node=1 --cpus-per-task=$((${SLURM_CPUS_PER_TASK:-1} * ranks_of_host)))
case $SLURM_SUBMIT_DIR$HPCTRAIN_RUN_DIR in
*[,:]*)
    echo "a container cannot mount folders with , or : $SLURM_SUBMIT_DIR $HPCTRAIN_RUN_DIR" >&2
    exit 2
    ;;
esac
# In the container: the submit directory and that of the run, all variables, and the GPUs where the
# job has some.
launch+=(apptainer exec ${SLURM_GPUS_ON_NODE:+--nv} --pwd "$PWD" --bind "$SLURM_SUBMIT_DIR"
    --bind "$HPCTRAIN_RUN_DIR" --bind "$scratch" "$SLURM_SUBMIT_DIR"/images/torch.sif)
launch+=(python -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES"
    --nproc-per-node="$ranks_of_host" --rdzv-backend=c10d --rdzv-endpoint="$first_host:$port"
    --rdzv-id="$job-${SLURM_RESTART_COUNT:-0}" --)

printf 'job %s, start %s, on %s:%s\n' "$job" "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" \
    "$(printf ' %q' "${launch[@]}" "${command[@]}")"
# In the background: bash runs no trap while it waits for a command in the foreground.
"${launch[@]}" "${command[@]}" &
ranks=$!
# A signal ends `wait`, but not the ranks.
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks" || true; done
code=0
wait "$ranks" || code=$?

trap - EXIT
remove_copies

if [ -s "$HPCTRAIN_EXIT_STATUS_FILE" ]; then
    code_in_file=$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$HPCTRAIN_EXIT_STATUS_FILE")
    # A code of 0 does not cover failures after the session. An incomplete file is ignored.
    if [ "${code_in_file:-0}" != 0 ]; then code=$code_in_file; fi
elif [ "$code" != 0 ] && [ -e "$HPCTRAIN_STOP_FILE" ]; then
    code=75 # stopped before the first step
elif [ "$code" = $((128 + $(kill -l USR1))) ] || [ "$code" = $((128 + $(kill -l USR2))) ]; then
    code=75 # stopped by a signal while the ranks were still importing
fi
trap '' USR2
trap - TERM
rm -f "$HPCTRAIN_STOP_FILE" "$HPCTRAIN_EXIT_STATUS_FILE"
# Done, failed, or given up (76): the end.
if [ "$code" != 75 ]; then exit "$code"; fi

# The job was stopped. A job that is no longer RUNNING (or SIGNALING, while Slurm sends a signal) is
# not requeued here: a cancelled job must not restart, and Slurm requeues a preempted job itself.
if output=$(scontrol show job --oneliner "$job" 2>&1); then
    state=$(sed -n "s/^JobId=$SLURM_JOB_ID .* JobState=\([A-Z_]*\) Reason=.*/\1/p" <<<"$output")
    if [ "$state" != RUNNING ] && [ "$state" != SIGNALING ]; then
        echo "job $job is ${state:-unknown}: this script does not requeue it"
        echo "its checkpoints are in $HPCTRAIN_RUN_DIR"
        exit 75
    fi
    # The last command, as a requeue ends this script. `incomplete` excludes a job that was
    # just cancelled.
    if output=$(scontrol requeue incomplete "$job" 2>&1); then
        sleep 60
        output="scontrol requeue was accepted, but the job continues"
    fi
fi
echo "job $job was stopped and could not be requeued: $output"
echo "its checkpoints are in $HPCTRAIN_RUN_DIR; to continue, with the same sbatch options:"
# Slurm deletes the script some minutes after the end of the job.
script=$runs/job-$job.sh
if ! scontrol write batch_script "$SLURM_JOB_ID" "$script" >/dev/null 2>&1; then
    script=THE_SCRIPT
fi
quoted_arguments=$(printf ' %q' "$script" "${hpctrain_arguments[@]}")
echo "    HPCTRAIN_RUN_DIR=${HPCTRAIN_RUN_DIR@Q} sbatch$quoted_arguments --resume"
exit "$code"
