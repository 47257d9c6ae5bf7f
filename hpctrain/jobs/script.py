"""Batch script of a JobSpec, as readable as a hand-written one. Pure."""

import os.path
from collections.abc import Callable, Sequence

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.jobs.directives import directives
from hpctrain.jobs.environment import surroundings, variables
from hpctrain.jobs.job_end import ending
from hpctrain.jobs.launch_command import command, launch, python_script
from hpctrain.jobs.quoting import array, quote
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.staging import removal, staging

__all__ = ["render", "render_local"]

_SUBMIT_DIRECTORY = """\
set -euo pipefail

# Slurm runs a copy of this file, from its spool: only the submit directory is the user's.
cd "$SLURM_SUBMIT_DIR"
# Arguments after the script's name on sbatch's line, hidden from the files that are sourced below.
hpctrain_arguments=("$@")
set --"""

_ARGUMENTS = '"${hpctrain_arguments[@]}"'

_FROM_THE_LINE = f"""\
if [ "${{#hpctrain_arguments[@]}}" = 0 ]; then
    echo "nothing to run: the command follows the script's name" >&2
    exit 2
fi
command=({_ARGUMENTS})"""

_SETTINGS = """\
# One setting for each task of the array.
case ${{SLURM_ARRAY_TASK_ID:=none}} in
{cases}
    *) echo "no setting has the index $SLURM_ARRAY_TASK_ID" >&2 && exit 2 ;;
esac
echo "setting $SLURM_ARRAY_TASK_ID:$(printf ' %q' "${{setting[@]}}")\""""

_LABEL = """\
# A job that was submitted inside another job inherits its variables. Slurm overwrites only some of
# them: array variables only in an array, and the restart count only after a requeue.
if [ -n "${SLURM_ARRAY_TASK_ID:-}${SLURM_RESTART_COUNT:-}" ] &&
    record=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID "); then
    case ${record%% JobName=*} in
    *\\ ArrayTaskId=*) ;;
    *) unset "${!SLURM_ARRAY_@}" ;;
    esac
    count=$(sed -n 's/.* Restarts=\\([0-9]*\\) BatchFlag=.*/\\1/p' <<<"$record")
    SLURM_RESTART_COUNT=${count:-${SLURM_RESTART_COUNT:-0}}
fi
if [ -n "${HPCTRAIN_STOP_FILE:-}" ] && [ -n "${HPCTRAIN_RUN_DIR:-}" ]; then
    echo "ignored: HPCTRAIN_RUN_DIR=$HPCTRAIN_RUN_DIR, of the job that called sbatch"
    unset HPCTRAIN_RUN_DIR
fi

# The job's label in Slurm's tools. A requeue changes neither the label nor the run directory.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"""

_FILES = """\
# Two files on the file system that all hosts share, new for each start. The stop file makes
# the ranks save and exit. Rank 0 writes the exit status before they exit, as the exit code of a
# launcher depends on which rank exits first.
runs=$SLURM_SUBMIT_DIR/runs
mkdir -p "$runs"
export HPCTRAIN_STOP_FILE=$runs/.stop-$job-${SLURM_RESTART_COUNT:-0}
export HPCTRAIN_EXIT_STATUS_FILE=$runs/.exit-status-$job-${SLURM_RESTART_COUNT:-0}
rm -f "$runs"/.stop-"$job"-* "$runs"/.exit-status-"$job"-*

# Without a secret, another user of the hosts could guess the job's number and join the ranks.
HPCTRAIN_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export HPCTRAIN_SECRET"""

_TRAP = """\
trap 'touch "$HPCTRAIN_STOP_FILE"' {signals}
if [ -n "$hpctrain_signaled" ]; then touch "$HPCTRAIN_STOP_FILE"; fi"""

_RANKS = """\
printf 'job %s, start %s, on %s:%s\\n' "$job" "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" \\
    "$(printf ' %q' "${launch[@]}" "${command[@]}")"
# In the background: bash runs no trap while it waits for a command in the foreground.
"${launch[@]}" "${command[@]}" &
ranks=$!
# A signal ends `wait`, but not the ranks.
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks" || true; done
code=0
wait "$ranks" || code=$?"""


def render(spec: JobSpec) -> str:
    """Return the text of the script that runs a job; the same spec gives the same text.

    Raises:
        UsageError: the launcher cannot start the command.
    """
    parts = [part if isinstance(part, str) else part(spec) for part in _PARTS]
    return _joined(_head(spec), *parts)


def render_local(spec: JobSpec) -> str:
    """Return the script that runs the job's ranks on this machine by `hpctrain run`, without Slurm.

    Fields for a scheduler (time, memory, partition, requeue, …) have no effect there.

    Raises:
        UsageError: the command is no Python script, or a field of the job requires Slurm.
    """
    for name in (
        *("container", "stage_code", "stage_environment", "stage_data"),
        *("array", "sweep", "function"),
    ):
        if getattr(spec, name):
            raise UsageError(
                "HT811",
                f"{name} on this machine",
                "a job without it",
                "hpctrain submit --via sbatch",
            )
    python, script = python_script(spec.argv, "this machine")
    nodes = ["--nodes", str(spec.nodes)] if spec.nodes > 1 else []
    start_command = [
        python,
        "-m",
        "hpctrain",
        "run",
        *nodes,
        "--nproc-per-node",
        str(spec.tasks),
        *script,
    ]
    command_line = array("command", [*(quote(argument) for argument in start_command), '"$@"'])
    run_directory = (
        f"run={_run(spec.run_dir, '$PWD')}\nexport HPCTRAIN_RUN_DIR=${{HPCTRAIN_RUN_DIR:-$run}}"
        if spec.run_dir
        else ""
    )
    shell = "#!/bin/bash\nset -euo pipefail"
    return _joined(
        shell,
        command_line,
        surroundings(spec),
        variables(spec),
        run_directory,
        'exec "${command[@]}"',
    )


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(spec: JobSpec) -> str:
    lines = [f"# {printable(line)}".rstrip() for line in spec.about.strip().splitlines()]
    return "\n".join(["#!/bin/bash", *lines, *["#"] * bool(lines), directives(spec)])


def _command(spec: JobSpec) -> str:
    command_line = command(spec)
    if not command_line and (spec.sweep or spec.backend):
        raise UsageError(
            "HT803",
            f"{'sweep' if spec.sweep else 'backend'} without a command",
            "the command that gets these options",
        )
    if not command_line:
        return _FROM_THE_LINE
    if not spec.sweep:
        return array("command", [*command_line, _ARGUMENTS])
    cases = "\n".join(
        f"    {index}) setting=({_setting(setting)}) ;;" for index, setting in enumerate(spec.sweep)
    )
    command_line += ['"${setting[@]}"', _ARGUMENTS]
    return f"{_SETTINGS.format(cases=cases)}\n{array('command', command_line)}"


def _setting(setting: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"--{name} {quote(value)}" for name, value in setting)


def _threads(spec: JobSpec) -> str:
    if spec.launcher == "none":
        return ""
    return """\
# Default for each rank; lines below may change it. torch would use all CPUs of the host.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}"""


def _run_directory(spec: JobSpec) -> str:
    if spec.run_dir:
        default = (
            _run(spec.run_dir, "$SLURM_SUBMIT_DIR")
            + "${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}"
        )
    else:
        default = "$SLURM_SUBMIT_DIR/runs/${SLURM_JOB_NAME//\\//_}-$job"
    folder = os.path.dirname(spec.output)
    below = _run(folder, '"$SLURM_SUBMIT_DIR"')
    log = f"mkdir -p -- {below}\n" if folder and "%" not in folder else ""
    return f"""\
# To continue a run: HPCTRAIN_RUN_DIR=runs/NAME-JOB sbatch …
if [ -n "${{HPCTRAIN_RUN_DIR:-}}" ] && [ "${{SLURM_ARRAY_TASK_COUNT:-1}}" -gt 1 ]; then
    echo "HPCTRAIN_RUN_DIR=$HPCTRAIN_RUN_DIR: one directory, $SLURM_ARRAY_TASK_COUNT tasks" >&2
    exit 2
fi
run={default}
HPCTRAIN_RUN_DIR=${{HPCTRAIN_RUN_DIR:-$run}}
case $HPCTRAIN_RUN_DIR in /*) ;; *) HPCTRAIN_RUN_DIR=$SLURM_SUBMIT_DIR/$HPCTRAIN_RUN_DIR ;; esac
export HPCTRAIN_RUN_DIR
mkdir -p -- "$HPCTRAIN_RUN_DIR"
{log}""".rstrip()


def _run(path: str, base: str) -> str:
    """Return a path as an absolute word of bash; relative paths are below `base`."""
    return quote(path) if os.path.isabs(path) else f"{base}/{quote(path)}"


def _signals(spec: JobSpec) -> str:
    return "TERM" if not spec.signal_seconds or spec.signal == "TERM" else f"{spec.signal} TERM"


def _early_trap(spec: JobSpec) -> str:
    signal = _signals(spec).removesuffix("TERM").strip()
    before = f"{signal} before the end of the time limit, and " if signal else ""
    return f"""\
# Slurm sends {before}TERM when it preempts the job.
hpctrain_signaled=
trap 'hpctrain_signaled=yes' {_signals(spec)}"""


def _trap(spec: JobSpec) -> str:
    return _TRAP.format(signals=_signals(spec))


def _launch(spec: JobSpec) -> str:
    change_folder = '# The ranks start where this shell is.\ncd "$scratch/code"\n\n'
    return (change_folder if spec.stage_code else "") + launch(spec) + _in_staged(spec)


def _in_staged(spec: JobSpec) -> str:
    if not spec.stage_environment:
        return ""
    return """
# For the ranks only: this shell must not run programs from a folder in /tmp.
launch=(env "PATH=$scratch/environment/bin:$PATH" "${launch[@]}")"""


# Parts in the order of the script: text, or functions that return text, which may be empty.
_PARTS: Sequence[str | Callable[[JobSpec], str]] = (
    _SUBMIT_DIRECTORY,
    _early_trap,
    _threads,
    surroundings,
    _LABEL,
    _command,
    _run_directory,
    _FILES,
    _trap,
    staging,
    variables,
    _launch,
    _RANKS,
    removal,
    ending,
)
