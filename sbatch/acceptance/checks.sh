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
# What the start after the requeue has to know lies in here.
folder=$PWD/runs/acceptance-$SLURM_JOB_ID
page=acceptance-$SLURM_JOB_ID.txt

# Long enough to be interrupted, short enough for a site's patience.
steps=60
every=10
# 1437 digits have to do for a step of all ranks.
batch=$((ranks > 64 ? 1024 / ranks : 16))
# Seconds for the ranks to meet, for one training, and for the others to end after one was killed.
meet=120
limit=300
patience=60

step=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
# Beside a training that has all CPUs and GPUs of the job.
beside=(srun --overlap --ntasks-per-node=1 --cpus-per-task=1)

# Prints what Slurm calls the job's state; nothing where Slurm does not answer.
job_state() {
    scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' || true
}

# --- the page: written whole around each check, so that it is complete whenever the job dies

write_header() {
    local commit versions
    commit=$(git describe --always --dirty=' (with changes)' 2>>"$folder/header.err") ||
        commit='not known: no git checkout'
    versions=$(
        python -c 'import platform; print("Python", platform.python_version(), end=", ")'
        python -c 'import importlib.metadata as m; print("torch", m.version("torch"), end=", ")'
        python -m hpctrain --version
    ) 2>>"$folder/header.err" || versions="${versions:-}and more that python did not tell"
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

# Says in one line how it stands; leaves with 0 only where all checks passed.
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

# Runs one check, whatever comes of it. Its output is its part of the page.
check() {
    local name=$1 code=0 outcome=pass state
    if [ -f "$folder/results/$name" ]; then return; fi # by the start before the requeue
    echo "check: $name"
    if [ ! -f "$folder/$name.begun" ]; then date +%s >"$folder/$name.begun"; fi
    write_page
    # Not in a condition, where bash would go on after errors inside of the check.
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
        # What a cancelled job did not do is no failure of the cluster.
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

# --- who is there, and can they compute a sum?

check_identity() {
    local found=$folder/identity
    mkdir -p "$found"
    # One file for each task, named by Slurm's number and not by what the task thinks.
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
        said = f"rank {world['rank']} of {world['world_size']}"
        wrong.append(f"Slurm's task {task} of {ranks} takes itself for {said}")
print("\n".join(wrong) or f"{ranks} ranks, each once, with the numbers that Slurm gave them")
sys.exit(bool(wrong))
EOF
}

# The doctor over all ranks, for two checks; fails where it did not come to a table.
examine() {
    if [ ! -f "$folder/doctor.json" ]; then
        "${step[@]}" python -m hpctrain doctor --json --start-timeout "$meet" --run-dir "$folder" \
            >"$folder/.doctor" 2>"$folder/doctor.log" || true
        mv "$folder/.doctor" "$folder/doctor.json"
    fi
    if [ ! -s "$folder/doctor.json" ]; then
        echo "hpctrain doctor told nothing: see doctor.log; to see it: srun hpctrain doctor"
        return 1
    fi
}

check_gpus() {
    examine
    python - "$folder/doctor.json" "$ranks" "${SLURM_GPUS_ON_NODE:-${SLURM_JOB_GPUS:-}}" <<'EOF'
import collections, json, sys

rows, ranks, given = json.load(open(sys.argv[1]))["ranks"], int(sys.argv[2]), sys.argv[3]
if len(rows) != ranks:
    print(f"the doctor saw {len(rows)} of {ranks} ranks: see the check all-reduce")
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
print("\n".join(shared) or (f"{ranks} ranks, each with a GPU of its own" if holders else
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

told = json.load(open(sys.argv[1]))
sums = told["all_reduce"]
right = sums is not None and sums["correct"]
if sums is None:
    print("no sum was computed")
else:
    speeds = ", ".join(
        f"{one['gigabytes_per_second']:.3g} GB/s of {one['bytes'] // 10**6} MB"
        for one in sums["bus_bandwidth"]
    )
    print(f"sums {'exact' if right else 'WRONG'} at all ranks, over {sums['transport']}: {speeds}")
    print(f"beside a memory copy: {sums['copy_gigabytes_per_second']:.3g} GB/s")
problems = [one for one in told["findings"] if one["level"] == "problem"]
for one in [*problems, *(one for one in told["findings"] if one["level"] == "warning")]:
    print(f"{one['level']}: {one['subject']} (ranks {', '.join(map(str, one['ranks'][:8]))}"
          f"{', …' if len(one['ranks']) > 8 else ''}): {one['found']}")
    for number, fix in enumerate(one["fixes"]):
        print(f"  {'or: ' if number else 'fix:'} {fix}")
sys.exit(bool(problems) or not right)
EOF
}

# --- a training, left alone and not

# train RUN LOG [options]: the digits, in the run directory RUN; leaves with how it ended.
train() {
    # HPCTRAIN_RUN_DIR also tells its processes from all others on the hosts.
    local -x HPCTRAIN_RUN_DIR=$folder/$1 HPCTRAIN_EXIT_STATUS_FILE=$folder/.exit-status-$2
    local log=$folder/$2.log code=0 said
    shift 2
    rm -f "$HPCTRAIN_EXIT_STATUS_FILE"
    # In fp64 a wrong order of samples shows, and rounding does not.
    timeout --kill-after=30 "$limit" "${step[@]}" python examples/mnist.py --data digits \
        --batch-size "$batch" --precision fp64 --deterministic --max-steps "$steps" \
        --log-every "$every" --checkpoint-every "$every" --start-timeout "$meet" "$@" \
        >"$log" 2>&1 || code=$?
    # Rank 0 wrote here how the run ended; the code of srun depends on which rank left first.
    if [ "$code" = 0 ] && [ -s "$HPCTRAIN_EXIT_STATUS_FILE" ]; then
        said=$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$HPCTRAIN_EXIT_STATUS_FILE")
        code=${said:-1}
    fi
    return "$code"
}

# trained RUN LOG CODE: prints the metrics, and fails where it did not end well.
trained() {
    if [ "$3" != 0 ]; then
        echo "the training left with $3; the end of $2.log:"
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

# same_as_reference RUN: prints how near its last metrics are to those of the run left alone.
same_as_reference() {
    if [ ! -f "$folder/reference/summary.json" ]; then
        echo "nothing to compare with: the reference did not end"
        return 1
    fi
    python - "$folder/reference" "$folder/$1" <<'EOF'
import json, pathlib, sys

tolerance = 1e-6
summaries = [pathlib.Path(path, "summary.json") for path in sys.argv[1:]]
reference, run = (json.loads(path.read_text())["metrics"] for path in summaries)
apart = abs(run["loss"] - reference["loss"]) / abs(reference["loss"])
top1 = "equal" if run["top1"] == reference["top1"] else f"not {reference['top1']:.4f}"
print(f"against the reference: loss {apart:.1e} apart (at most {tolerance:.0e}), top1 {top1}")
sys.exit(not apart <= tolerance or run["top1"] != reference["top1"])
EOF
}

# went_on LOG: prints the step at which a run was resumed; fails where it was not.
went_on() {
    local at
    at=$(sed -n 's/.*resumed at step \([0-9]*\).*/\1/p' "$folder/$1.log" | head -n 1)
    if [ -z "$at" ] || [ "$at" -le 0 ] || [ "$at" -ge "$steps" ]; then
        echo "it did not go on from a checkpoint in the middle: see $1.log"
        return 1
    fi
    echo "$at"
}

# Sends the last rank of the run $1 the signal $2 when a line comes in. Started before the training
# and on the rank's host, as a step that were started later might come too late.
arm() {
    # shellcheck disable=SC2016 # for the other host's shell
    coproc armed {
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
    armed_pid=$armed_PID
}

fire() {
    echo now >&"${armed[1]}"
    if ! ends "$armed_pid"; then
        echo "srun --overlap started no step beside the training within $patience s"
        return 1
    fi
}

# Waits for the end of process $1; fails where that takes too long.
ends() {
    timeout "$patience" tail --pid="$1" --sleep-interval=0.1 -f /dev/null
}

# At the end of a check, so that the next one has the hosts and the run directory for itself.
end_training() {
    if [ -n "${training:-}" ]; then
        pkill -P "$training" || true
        wait "$training" || true
    fi
}

# Waits for the first checkpoint of run $1; fails where the process $2 ends before.
first_checkpoint() {
    until compgen -G "$folder/$1/checkpoints/step-*" >/dev/null; do
        if ! kill -0 "$2" 2>/dev/null; then return 1; fi
        sleep 0.05
    done
}

# Prints the processes of run $1 that are left on any host of the job.
left_over() {
    # shellcheck disable=SC2016 # for the other hosts' shells
    "${beside[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" bash -c '
        for process in /proc/[0-9]*; do
            if grep -qzxF "HPCTRAIN_RUN_DIR=$1" "$process/environ"; then
                echo "left on $(hostname): process ${process#/proc/}"
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
    local code=0 shot named left
    rm -rf "$folder/killed"
    arm killed KILL
    train killed killed --no-resume &
    training=$!
    if ! first_checkpoint killed "$training"; then
        echo "the training ended before its first checkpoint; the end of killed.log:"
        tail -n 5 "$folder/killed.log"
        return 1
    fi
    fire
    shot=$(date +%s.%N)
    if ! ends "$training"; then
        echo "rank $last_rank on $last_host was killed; after $patience s the others still run"
        return 1
    fi
    wait "$training" || code=$?
    echo "rank $last_rank on $last_host killed; srun left with $code after $(
        python -c 'import sys, time; print(f"{time.time() - float(sys.argv[1]):.1f}")' "$shot"
    ) s (at most $patience)"
    left=$(left_over killed)
    named=$(grep -m 1 -E "tasks? ([0-9,-]*[,-])?$last_rank: Killed" "$folder/killed.log" || true)
    echo "${named:-no line of killed.log names it}"
    echo "${left:-nothing of it is left on the hosts}"
    [ "$code" != 0 ] && [ -n "$named" ] && [ -z "$left" ]
}

check_resume() {
    local code=0 at
    if [ ! -d "$folder/killed/checkpoints" ]; then
        echo "nothing to go on from: the killed run has no checkpoint"
        return 1
    fi
    train killed resumed --resume || code=$?
    trained killed resumed "$code"
    at=$(went_on resumed) || { echo "$at"; return 1; }
    echo "went on from its last checkpoint at step $at"
    same_as_reference killed
}

check_preempt() {
    local code=0 at
    if [ ! -f "$folder/preempt.waiting" ]; then requeue; fi
    # The restart count alone makes it resume.
    train requeued after-requeue || code=$?
    trained requeued after-requeue "$code"
    at=$(went_on after-requeue) || { echo "$at"; return 1; }
    echo "killed and requeued by Slurm; went on from its last checkpoint at step $at"
    echo "hosts after it: $SLURM_JOB_NODELIST"
    same_as_reference requeued
}

# Has Slurm requeue this job while it trains; comes back only where that does not happen.
requeue() {
    local state said
    rm -rf "$folder/requeued"
    arm requeued STOP
    train requeued before-requeue --no-resume &
    training=$!
    if ! first_checkpoint requeued "$training"; then
        echo "the training ended before its first checkpoint; the end of before-requeue.log:"
        tail -n 5 "$folder/before-requeue.log"
        exit 1
    fi
    # The training waits for its stopped rank, however long Slurm takes.
    fire
    echo "requeue asked for at $(date '+%H:%M:%S'); the start after it has not ended" \
        >"$folder/preempt.waiting"
    write_page
    # Once only, and never a job that was cancelled meanwhile: it would come back to life.
    state=$(job_state)
    if [ "$state" != RUNNING ]; then
        rm "$folder/preempt.waiting"
        write_page
        echo "not requeued: Slurm says ${state:-nothing} of this job"
        exit 1
    fi
    if said=$(scontrol requeue incomplete "$SLURM_JOB_ID" 2>&1); then
        # Slurm ends this shell.
        sleep "$limit"
        said="accepted, but the job still runs after $limit s"
    fi
    echo "scontrol requeue: $said"
    echo "fix: sbatch --requeue sbatch/acceptance.sh"
    echo "where that does not help, the site forbids it, and a preempted job has to be submitted"
    echo "again by hand, its command with --resume --run-dir DIR"
    exit 1
}

if [ "$ranks" -lt 2 ]; then
    echo "$ranks rank, but the checks need two: sbatch --ntasks=2 sbatch/acceptance.sh" >&2
    exit 2
fi
# A number that Slurm gave before, to another job.
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then rm -rf "$folder"; fi
mkdir -p "$folder/results"
if [ ! -f "$folder/header" ]; then write_header; fi
write_page
for name in "${checks[@]}"; do check "$name"; done
cat "$page"
closing >/dev/null
