"""Batch script of a JobSpec, as readable as a hand-written one. Pure."""

import os.path
from collections.abc import Callable, Sequence

from hpctrain.errors import UsageError
from hpctrain.jobs.directives import directives
from hpctrain.jobs.environment import surroundings, variables
from hpctrain.jobs.launch_command import command, launch, python_script
from hpctrain.jobs.quoting import array, word
from hpctrain.jobs.requeue import ending
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.staging import removal, staging

__all__ = ["render", "render_local"]

_SUBMIT_DIRECTORY = """\
set -euo pipefail

# Slurm runs a copy of this file, from its spool: only the submit directory is the user's.
cd "$SLURM_SUBMIT_DIR"
# What follows the script's name on sbatch's line; no file that is read below gets to see it.
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
# Where sbatch was called in another job, that one's variables came along. Slurm puts its own in
# their place only where it has some: not in a job that is no array, or was not requeued.
if [ -n "${SLURM_ARRAY_TASK_ID:-}${SLURM_RESTART_COUNT:-}" ] &&
    shown=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID "); then
    case ${shown%% JobName=*} in
    *\\ ArrayTaskId=*) ;;
    *) unset "${!SLURM_ARRAY_@}" ;;
    esac
    count=$(sed -n 's/.* Restarts=\\([0-9]*\\) BatchFlag=.*/\\1/p' <<<"$shown")
    SLURM_RESTART_COUNT=${count:-${SLURM_RESTART_COUNT:-0}}
fi
if [ -n "${HPCTRAIN_STOP_FILE:-}" ] && [ -n "${HPCTRAIN_RUN_DIR:-}" ]; then
    echo "not used: HPCTRAIN_RUN_DIR=$HPCTRAIN_RUN_DIR, of the job in which sbatch was called"
    unset HPCTRAIN_RUN_DIR
fi

# As Slurm's own tools call it; a requeue changes neither this nor the run directory.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"""

_FILES = """\
# Two files on the file system that all hosts share, new for each start. This script makes the stop
# file, which asks the ranks to save and to leave. Rank 0 writes the exit status before they do, as
# the exit code of a launcher depends on which rank left first.
runs=$SLURM_SUBMIT_DIR/runs
mkdir -p "$runs"
export HPCTRAIN_STOP_FILE=$runs/.stop-$job-${SLURM_RESTART_COUNT:-0}
export HPCTRAIN_EXIT_STATUS_FILE=$runs/.exit-status-$job-${SLURM_RESTART_COUNT:-0}
rm -f "$runs"/.stop-"$job"-* "$runs"/.exit-status-"$job"-*

# Without it another user of the hosts who guesses the job's number could join the ranks.
HPCTRAIN_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export HPCTRAIN_SECRET"""

_TRAP = """\
trap 'touch "$HPCTRAIN_STOP_FILE"' {signals}
if [ -n "$hpctrain_asked" ]; then touch "$HPCTRAIN_STOP_FILE"; fi"""

_RANKS = """\
printf 'job %s, start %s, on %s:%s\\n' "$job" "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" \\
    "$(printf ' %q' "${launch[@]}" "${command[@]}")"
# In the background: bash runs no trap while it waits for a command in front.
"${launch[@]}" "${command[@]}" &
ranks=$!
# A signal ends `wait`, and not the ranks.
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
    start = [python, "-m", "hpctrain", "run", *nodes, "--nproc-per-node", str(spec.tasks), *script]
    words = array("command", [*(word(one) for one in start), '"$@"'])
    run = (
        f"run={_run(spec.run_dir, '$PWD')}\nexport HPCTRAIN_RUN_DIR=${{HPCTRAIN_RUN_DIR:-$run}}"
        if spec.run_dir
        else ""
    )
    shell = "#!/bin/bash\nset -euo pipefail"
    return _joined(shell, words, surroundings(spec), variables(spec), run, 'exec "${command[@]}"')


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(spec: JobSpec) -> str:
    about = [
        "# " + "".join(one if one.isprintable() else "?" for one in line)
        for line in spec.about.strip().split("\n")
    ]
    lines = [line.rstrip() for line in about] if spec.about.strip() else []
    return "\n".join(["#!/bin/bash", *lines, *["#"] * bool(lines), directives(spec)])


def _command(spec: JobSpec) -> str:
    words = command(spec)
    if not words and (spec.sweep or spec.backend):
        raise UsageError(
            "HT803",
            f"{'sweep' if spec.sweep else 'backend'} without a command",
            "the command that gets these options",
        )
    if not words:
        return _FROM_THE_LINE
    if not spec.sweep:
        return array("command", [*words, _ARGUMENTS])
    cases = "\n".join(
        f"    {index}) setting=({_setting(setting)}) ;;" for index, setting in enumerate(spec.sweep)
    )
    words += ['"${setting[@]}"', _ARGUMENTS]
    return f"{_SETTINGS.format(cases=cases)}\n{array('command', words)}"


def _setting(setting: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"--{name} {word(value)}" for name, value in setting)


def _threads(spec: JobSpec) -> str:
    if spec.launcher == "none":
        return ""
    return """\
# Of each rank, unless something below says otherwise; torch would take all CPUs of the host.
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
# One that was given goes on: HPCTRAIN_RUN_DIR=runs/NAME-JOB sbatch …
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
    return word(path) if os.path.isabs(path) else f"{base}/{word(path)}"


def _signals(spec: JobSpec) -> str:
    return "TERM" if not spec.lead or spec.signal == "TERM" else f"{spec.signal} TERM"


def _early_trap(spec: JobSpec) -> str:
    signal = _signals(spec).removesuffix("TERM").strip()
    before = f"{signal} comes before the end of the time, " if signal else ""
    return f"""\
# {before}TERM where Slurm takes the hosts away.
hpctrain_asked=
trap 'hpctrain_asked=yes' {_signals(spec)}"""


def _trap(spec: JobSpec) -> str:
    return _TRAP.format(signals=_signals(spec))


def _launch(spec: JobSpec) -> str:
    there = '# The ranks start where this shell is.\ncd "$scratch/code"\n\n'
    return (there if spec.stage_code else "") + launch(spec) + _in_staged(spec)


def _in_staged(spec: JobSpec) -> str:
    if not spec.stage_environment:
        return ""
    return """
# For the ranks alone: what this shell calls is not sought in a folder of /tmp.
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
