#!/bin/bash
# The checks of the acceptance page, which sbatch/acceptance.sh runs on the first host of its job;
# docs/acceptance.md has a page, line by line. It starts with the submit directory, a secret for the
# ranks and the right `python` from there.

set -euo pipefail

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

checks=(identity gpus all-reduce train kill resume preempt)
ranks=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-1}))}
last_rank=$((ranks - 1))
last_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
# Files for the start after the requeue are in this folder too.
folder=$PWD/runs/acceptance-$SLURM_JOB_ID
page=acceptance-$SLURM_JOB_ID.txt

# Long enough to be interrupted, short enough for a quick check.
steps=60
every=10
# The 1437 digits must be enough for a step of all ranks.
batch=$((ranks > 64 ? 1024 / ranks : 16))
# Seconds for the rendezvous, for one training, and for the end of all ranks after one was killed.
meet=120
limit=300
patience=60

step=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
# For a step at the same time as a training that has all CPUs and GPUs of the job.
beside=(srun --overlap --ntasks-per-node=1 --cpus-per-task=1)

# Prints the state of the job in Slurm; nothing if Slurm does not respond.
job_state() {
    scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' || true
}

# --- the page: written before and after each check, so it is complete even if the job is killed

write_header() {
    local commit versions
    commit=$(git describe --always --dirty=' (with changes)' 2>>"$folder/header.err") ||
        commit='not known: no git checkout'
    versions=$(
        python -c 'import platform; print("Python", platform.python_version(), end=", ")'
        python -c 'import importlib.metadata as m; print("torch", m.version("torch"), end=", ")'
        python -m hpctrain --version
    ) 2>>"$folder/header.err" || versions="${versions:-}not all versions known"
    cat >"$folder/header" <<EOF
hpctrain acceptance, job $SLURM_JOB_ID
  begun     $(date '+%Y-%m-%d %H:%M:%S %z')
  cluster   ${SLURM_CLUSTER_NAME:-not named}
  hosts     $SLURM_JOB_NODELIST, $ranks ranks
  versions  $(scontrol --version | sed 's/.* /Slurm /'), $versions
  commit    $commit
  files     $folder

EOF
}

# Prints the state of all checks in one line; returns 0 only if all checks passed.
closing() {
    local name outcome ended=0 passed=0 now total=${#checks[@]}
    now=$(date '+%Y-%m-%d %H:%M:%S %z')
    for name in "${checks[@]}"; do
        if [ -f "$folder/results/$name" ]; then
            read -r outcome _ <"$folder/results/$name"
            ended=$((ended + 1))
            if [ "$outcome" = pass ]; then passed=$((passed + 1)); fi
        fi
    done
    if [ "$passed" = "$total" ]; then
        echo "PASSED: all $total checks, $now"
    elif [ "$ended" = "$total" ]; then
        echo "FAILED: $((ended - passed)) of $total checks, $now"
        return 1
    else
        echo "NOT COMPLETE: $ended of $total checks ended, $((ended - passed)) failed, $now"
        return 1
    fi
}

write_page() {
    local number=0 name outcome seconds
    {
        cat "$folder/header"
        for name in "${checks[@]}"; do
            number=$((number + 1))
            outcome='not reached' seconds=''
            if [ -f "$folder/results/$name" ]; then
                read -r outcome seconds <"$folder/results/$name"
            elif [ -f "$folder/$name.begun" ]; then
                outcome='begun, not ended'
            fi
            printf '%d  %-10s  %s%s\n' "$number" "$name" "$outcome" "${seconds:+, $seconds s}"
            if [ -f "$folder/results/$name" ]; then
                sed '1d; s/^/     /' "$folder/results/$name"
            elif [ -f "$folder/$name.waiting" ]; then
                sed 's/^/     /' "$folder/$name.waiting"
            fi
        done
        echo
        closing || true
    } >".$page"
    mv ".$page" "$page"
}

# Runs one check; a failed check does not end the script. Its output is its part of the page.
check() {
    local name=$1 code=0 outcome=pass state
    if [ -f "$folder/results/$name" ]; then return; fi # by the start before the requeue
    echo "check: $name"
    if [ ! -f "$folder/$name.begun" ]; then date +%s >"$folder/$name.begun"; fi
    write_page
    # Not in a condition, because bash would then continue after errors inside of the check.
    set +e
    (
        set -e
        trap end_training EXIT
        "check_$name"
    ) >"$folder/$name.out" 2>"$folder/$name.err"
    code=$?
    set -e
    if [ "$code" != 0 ]; then
        outcome=FAIL
        # A check that ends because the job was cancelled is no failure of the cluster.
        state=$(job_state)
        if [ "${state:-RUNNING}" != RUNNING ]; then exit 1; fi
    fi
    {
        echo "$outcome $(($(date +%s) - $(<"$folder/$name.begun")))"
        cat "$folder/$name.out"
        if [ "$outcome" = FAIL ]; then tail -n 5 "$folder/$name.err"; fi
    } >"$folder/.result"
    mv "$folder/.result" "$folder/results/$name"
    write_page
}

# --- identity of the ranks, GPUs, and a sum over the ranks

check_identity() {
    local found=$folder/identity
    mkdir -p "$found"
    # One file for each task, named by Slurm's task number, which need not be the task's own rank.
    if ! "${step[@]}" --output="$found/%t.json" python -m hpctrain explain --json --strict; then
        echo "hpctrain explain --strict refused a rank:"
        return 1
    fi
    python - "$found" "$ranks" <<'EOF'
import json, pathlib, sys

folder, ranks = pathlib.Path(sys.argv[1]), int(sys.argv[2])
wrong = []
for task in range(ranks):
    world = json.loads((folder / f"{task}.json").read_text())
    if (world["rank"], world["world_size"]) != (task, ranks):
        rank = f"rank {world['rank']} of {world['world_size']}"
        wrong.append(f"Slurm's task {task} of {ranks} is {rank} for hpctrain")
print("\n".join(wrong) or f"{ranks} ranks, each once, with the numbers that Slurm gave them")
sys.exit(bool(wrong))
EOF
}

# Runs the doctor over all ranks, for two checks; fails if it wrote no report.
examine() {
    if [ ! -f "$folder/doctor.json" ]; then
        "${step[@]}" python -m hpctrain doctor --json --start-timeout "$meet" --run-dir "$folder" \
            >"$folder/.doctor" 2>"$folder/doctor.log" || true
        mv "$folder/.doctor" "$folder/doctor.json"
    fi
    if [ ! -s "$folder/doctor.json" ]; then
        echo "hpctrain doctor wrote no report: see doctor.log; to see it: srun hpctrain doctor"
        return 1
    fi
}

check_gpus() {
    examine
    python - "$folder/doctor.json" "$ranks" "${SLURM_GPUS_ON_NODE:-${SLURM_JOB_GPUS:-}}" <<'EOF'
import collections, json, sys

rows, ranks, given = json.load(open(sys.argv[1]))["ranks"], int(sys.argv[2]), sys.argv[3]
if len(rows) != ranks:
    print(f"the doctor found {len(rows)} of {ranks} ranks: see the check all-reduce")
    sys.exit(1)
without = [row["rank"] for row in rows if row["gpu"] is None]
holders = collections.defaultdict(list)
for row in rows:
    if row["gpu"] is not None:
        holders[row["host"], row["gpu"]].append(row["rank"])
shared = [f"ranks {several} share one GPU" for several in holders.values() if len(several) > 1]
if without and (given or holders):
    print(f"ranks without a GPU, though the job has some: {without}; see doctor.json")
    sys.exit(1)
print("\n".join(shared) or (f"{ranks} ranks, each with a separate GPU" if holders else
      "no GPUs in this job: the ranks compute on the CPU"))
if holders and ranks <= 32:
    for row in rows:
        print(f"  rank {row['rank']}  {row['host']}  {row['device']}  {row['gpu']}")
sys.exit(bool(shared))
EOF
}

check_all-reduce() {
    examine
    python - "$folder/doctor.json" <<'EOF'
import json, sys

report = json.load(open(sys.argv[1]))
sums = report["all_reduce"]
right = sums is not None and sums["correct"]
if sums is None:
    print("no sum was computed")
else:
    print(f"sums {'exact' if right else 'WRONG'} at all ranks, over {sums['transport']}")
by_level = {"problem": [], "warning": []}
for finding in report["findings"]:
    by_level[finding["level"]].append(finding)
problems = by_level["problem"]
for finding in [*problems, *by_level["warning"]]:
    ranks = ", ".join(map(str, finding["ranks"][:8])) + ", …" * (len(finding["ranks"]) > 8)
    print(f"{finding['level']}: {finding['subject']} (ranks {ranks}): {finding['found']}")
    for number, fix in enumerate(finding["fixes"]):
        print(f"  {'or: ' if number else 'fix:'} {fix}")
sys.exit(bool(problems) or not right)
EOF
}

# --- trainings: undisturbed, killed, resumed, requeued

# train RUN LOG [options]: trains on the digits, in the run directory RUN; returns the exit code.
train() {
    # HPCTRAIN_RUN_DIR also identifies the processes of this training on the hosts.
    local -x HPCTRAIN_RUN_DIR=$folder/$1 HPCTRAIN_EXIT_STATUS_FILE=$folder/.exit-status-$2
    local log=$folder/$2.log code=0 status
    shift 2
    rm -f "$HPCTRAIN_EXIT_STATUS_FILE"
    # In fp64 a wrong order of samples changes the loss visibly, and rounding does not.
    timeout --kill-after=30 "$limit" "${step[@]}" python examples/mnist.py --data digits \
        --batch-size "$batch" --precision fp64 --deterministic --max-steps "$steps" \
        --log-every "$every" --checkpoint-every "$every" --start-timeout "$meet" "$@" \
        >"$log" 2>&1 || code=$?
    # Rank 0 wrote the exit code of the run here; that of srun depends on which rank ended first.
    if [ "$code" = 0 ] && [ -s "$HPCTRAIN_EXIT_STATUS_FILE" ]; then
        status=$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$HPCTRAIN_EXIT_STATUS_FILE")
        code=${status:-1}
    fi
    return "$code"
}

# trained RUN LOG CODE: prints the metrics; fails if the training did not succeed.
trained() {
    if [ "$3" != 0 ]; then
        echo "the training ended with exit code $3; the end of $2.log:"
        tail -n 5 "$folder/$2.log"
        return 1
    fi
    python - "$folder/$1" "$steps" <<'EOF'
import json, pathlib, sys

run, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
summary = json.loads((run / "summary.json").read_text())
metrics = summary["metrics"]
print(f"{summary['step']} steps: loss {metrics['loss']:.9g}, top1 {metrics['top1']:.4f}")
sys.exit((summary["status"], summary["step"]) != ("done", steps))
EOF
}

# same_as_reference RUN: compares its last metrics with those of the reference.
same_as_reference() {
    if [ ! -f "$folder/reference/summary.json" ]; then
        echo "nothing to compare with: the reference is not complete"
        return 1
    fi
    python - "$folder/reference" "$folder/$1" <<'EOF'
import json, pathlib, sys

tolerance = 1e-6
summaries = [pathlib.Path(path, "summary.json") for path in sys.argv[1:]]
reference, run = (json.loads(path.read_text())["metrics"] for path in summaries)
apart = abs(run["loss"] - reference["loss"]) / abs(reference["loss"])
top1 = "equal" if run["top1"] == reference["top1"] else f"not {reference['top1']:.4f}"
print(f"against the reference: loss differs by {apart:.1e} (at most {tolerance:.0e}), top1 {top1}")
sys.exit(not apart <= tolerance or run["top1"] != reference["top1"])
EOF
}

# resume_step LOG: prints the step at which a run was resumed; fails if it was not resumed.
resume_step() {
    local at
    at=$(sed -n 's/.*resumed at step \([0-9]*\).*/\1/p' "$folder/$1.log" | head -n 1)
    if [ -z "$at" ] || [ "$at" -le 0 ] || [ "$at" -ge "$steps" ]; then
        echo "it did not continue from a checkpoint in the middle: see $1.log"
        return 1
    fi
    echo "$at"
}

# Prepares a job step that sends signal $2 to the last rank of run $1 when it reads a line. It
# starts before the training and on the rank's host, because a later start might be too late.
prepare_signal() {
    # shellcheck disable=SC2016 # for the other host's shell
    coproc signaller {
        exec "${beside[@]}" --nodes=1 --ntasks=1 --nodelist="$last_host" bash -c '
            read -r line || exit 0
            for process in /proc/[0-9]*; do
                if grep -qzxF "HPCTRAIN_RUN_DIR=$1" "$process/environ" &&
                    grep -qzxF "SLURM_PROCID=$3" "$process/environ"; then
                    kill -s "$2" "${process#/proc/}"
                fi
            done 2>/dev/null' acceptance "$folder/$1" "$2" "$last_rank"
    }
    # shellcheck disable=SC2154 # coproc sets it, and bash unsets it when the process has ended
    signaller_pid=$signaller_PID
}

send_signal() {
    echo now >&"${signaller[1]}"
    if ! wait_for_end "$signaller_pid"; then
        echo "srun --overlap started no step during the training within $patience s"
        return 1
    fi
}

# Waits for the end of process $1; fails if that takes too long.
wait_for_end() {
    timeout "$patience" tail --pid="$1" --sleep-interval=0.1 -f /dev/null
}

# At the end of a check, so that nothing uses the hosts and the run directory during the next one.
end_training() {
    if [ -n "${training:-}" ]; then
        pkill -P "$training" || true
        wait "$training" || true
    fi
}

# Waits for the first checkpoint of run $1; fails if the process $2 ends before.
first_checkpoint() {
    until compgen -G "$folder/$1/checkpoints/step-*" >/dev/null; do
        if ! kill -0 "$2" 2>/dev/null; then return 1; fi
        sleep 0.05
    done
}

# Prints the processes of run $1 that still exist on any host of the job.
remaining_processes() {
    # shellcheck disable=SC2016 # for the other hosts' shells
    "${beside[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" bash -c '
        for process in /proc/[0-9]*; do
            if grep -qzxF "HPCTRAIN_RUN_DIR=$1" "$process/environ"; then
                echo "still on $(hostname): process ${process#/proc/}"
            fi
        done 2>/dev/null
        exit 0' acceptance "$folder/$1"
}

check_train() {
    local code=0
    rm -rf "$folder/reference"
    train reference reference --no-resume || code=$?
    trained reference reference "$code"
}

check_kill() {
    local code=0 killed_at named remaining
    rm -rf "$folder/killed"
    prepare_signal killed KILL
    train killed killed --no-resume &
    training=$!
    if ! first_checkpoint killed "$training"; then
        echo "the training ended before its first checkpoint; the end of killed.log:"
        tail -n 5 "$folder/killed.log"
        return 1
    fi
    send_signal
    killed_at=$(date +%s.%N)
    if ! wait_for_end "$training"; then
        echo "rank $last_rank on $last_host was killed; after $patience s the others still run"
        return 1
    fi
    wait "$training" || code=$?
    echo "rank $last_rank on $last_host killed; srun ended with exit code $code after $(
        python -c 'import sys, time; print(f"{time.time() - float(sys.argv[1]):.1f}")' "$killed_at"
    ) s (at most $patience)"
    remaining=$(remaining_processes killed)
    named=$(grep -m 1 -E "tasks? ([0-9,-]*[,-])?$last_rank: Killed" "$folder/killed.log" || true)
    echo "${named:-no line of killed.log names it}"
    echo "${remaining:-no process of the run remains on the hosts}"
    [ "$code" != 0 ] && [ -n "$named" ] && [ -z "$remaining" ]
}

check_resume() {
    local code=0 at
    if [ ! -d "$folder/killed/checkpoints" ]; then
        echo "nothing to continue from: the killed run has no checkpoint"
        return 1
    fi
    train killed resumed --resume || code=$?
    trained killed resumed "$code"
    at=$(resume_step resumed) || { echo "$at"; return 1; }
    echo "continued from its last checkpoint at step $at"
    same_as_reference killed
}

check_preempt() {
    local code=0 at
    if [ ! -f "$folder/preempt.waiting" ]; then requeue; fi
    # The restart count alone makes it resume.
    train requeued after-requeue || code=$?
    trained requeued after-requeue "$code"
    at=$(resume_step after-requeue) || { echo "$at"; return 1; }
    echo "killed and requeued by Slurm; continued from its last checkpoint at step $at"
    echo "hosts after it: $SLURM_JOB_NODELIST"
    same_as_reference requeued
}

# Makes Slurm requeue this job while it trains; ends with 1 if Slurm does not requeue it.
requeue() {
    local state answer
    rm -rf "$folder/requeued"
    prepare_signal requeued STOP
    train requeued before-requeue --no-resume &
    training=$!
    if ! first_checkpoint requeued "$training"; then
        echo "the training ended before its first checkpoint; the end of before-requeue.log:"
        tail -n 5 "$folder/before-requeue.log"
        exit 1
    fi
    # The training waits for its stopped rank, however long Slurm takes.
    send_signal
    echo "requeue requested at $(date '+%H:%M:%S'); the start after it has not ended" \
        >"$folder/preempt.waiting"
    write_page
    # Only once, and never for a job that was cancelled meanwhile: Slurm would start it again.
    state=$(job_state)
    if [ "$state" != RUNNING ]; then
        rm "$folder/preempt.waiting"
        write_page
        echo "not requeued: the state of this job in Slurm is ${state:-unknown}"
        exit 1
    fi
    if answer=$(scontrol requeue incomplete "$SLURM_JOB_ID" 2>&1); then
        # Slurm ends this shell.
        sleep "$limit"
        answer="accepted, but the job still runs after $limit s"
    fi
    echo "scontrol requeue: $answer"
    echo "fix: sbatch --requeue sbatch/acceptance.sh"
    echo "if that does not help, the site forbids it: submit a preempted job again yourself, with"
    echo "--resume --run-dir DIR"
    exit 1
}

if [ "$ranks" -lt 2 ]; then
    echo "$ranks rank, but the checks need two: sbatch --ntasks=2 sbatch/acceptance.sh" >&2
    exit 2
fi
# Slurm may have used the same job number before. Hidden files are those of hpctrain run.
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then rm -rf "${folder:?}"/*; fi
mkdir -p "$folder/results"
if [ ! -f "$folder/header" ]; then write_header; fi
write_page
for name in "${checks[@]}"; do check "$name"; done
cat "$page"
closing >/dev/null
