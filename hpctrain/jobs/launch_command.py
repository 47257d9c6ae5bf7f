"""Commands that start the ranks: one function for each launcher, and a table. Pure bash text.

Each function returns the lines that set `launch`, the arguments before the command. The script
reads the numbers from Slurm when the job runs, so that options on sbatch's command line apply.
"""

import os.path
import re
from collections.abc import Callable, Mapping, Sequence

from hpctrain.errors import UsageError
from hpctrain.jobs.containers import inside
from hpctrain.jobs.quoting import quote
from hpctrain.jobs.spec import JobSpec

__all__ = ["command", "is_python", "launch", "python_script"]

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?\Z", re.ASCII)

_SRUN = """\
# Not every version of Slurm passes --cpus-per-task from sbatch to srun. Without --kill-on-bad-exit
# the other ranks would wait for a rank that died.
launch=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")"""

_TORCHRUN = """\
# One agent on each host, with the CPUs of all its ranks. The rendezvous is on the first host, at a
# port that differs for each start. Without -- torchrun would read --run-dir as its own --run-path.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_host=${{hosts%%$'\\n'*}}
ranks_of_host=${{SLURM_NTASKS_PER_NODE:-${{SLURM_GPUS_ON_NODE:-1}}}}
port=$((10000 + (SLURM_JOB_ID * 7 + ${{SLURM_RESTART_COUNT:-0}}) % 10000))
launch=(srun --kill-on-bad-exit=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"
    --ntasks-per-node=1 --cpus-per-task=$((${{SLURM_CPUS_PER_TASK:-1}} * ranks_of_host)))
{inside}launch+=({torchrun} --nnodes="$SLURM_JOB_NUM_NODES"
    --nproc-per-node="$ranks_of_host" --rdzv-backend=c10d --rdzv-endpoint="$first_host:$port"
    --rdzv-id="$job-${{SLURM_RESTART_COUNT:-0}}"{no_python} --)"""

_SLOTS = """\
# horovodrun expects host:slots,host:slots; the format of Slurm is 2(x3),1.
counts=()
for entry in ${SLURM_TASKS_PER_NODE//,/ }; do
    times=${entry#*x}
    if [ "$times" = "$entry" ]; then times=1; else times=${times%)}; fi
    for ((; times > 0; times--)); do counts+=("${entry%%(*}"); done
done
slots=
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    slots+=${slots:+,}$host:${counts[0]}
    counts=("${counts[@]:1}")
done"""

_HOROVODRUN = """
# Over ssh. Without --gloo, horovodrun would use mpirun if Horovod was built with MPI.
launch=(horovodrun --gloo -np "$SLURM_NTASKS" -H "$slots")"""

_ELASTIC = """\
# Each start of the ranks is an `srun --kill-on-bad-exit=1 --cpus-per-task=…` on the remaining
# hosts, with a secret that other users do not have. Rank 0's exit status is the result.
# After three successive starts without a new checkpoint, the run is given up (exit code 76)."""

_ELASTIC_SSH = """\
# Each start of the ranks is a horovodrun over ssh, on the hosts that answer. The result is rank 0's
# exit status. After three successive starts without a new checkpoint, the run is given up (exit
# code 76)."""


def command(spec: JobSpec) -> list[str]:
    """Return the command for the launcher, each argument quoted for bash.

    Raises:
        UsageError: the launcher starts only Python scripts, and the command is not one.
    """
    argv: Sequence[str] = spec.argv
    if spec.elastic:
        argv = python_script(argv, "elastic")[1]
    elif spec.launcher == "torchrun" and _starts_python(argv):
        argv = python_script(argv, "torchrun")[1]
    return [quote(argument) for argument in argv]


def launch(spec: JobSpec) -> str:
    """Return the lines of bash that set `launch`."""
    if spec.elastic:
        return _elastic(spec)
    return _LAUNCHERS[spec.launcher](spec)


def python_script(argv: Sequence[str], user: str) -> tuple[str, Sequence[str]]:
    """Return the Python of a command, and the script or `-m MODULE` with its arguments.

    Raises:
        UsageError: the command does not start a Python script or module.
    """
    if not _starts_python(argv):
        raise UsageError(
            "HT810",
            f"{user} with the command {' '.join(argv[:3])!r}",
            "python SCRIPT … or python -m MODULE …",
            "use a Python script",
            "choose another launcher",
        )
    return argv[0], argv[1:]


def is_python(program: str) -> bool:
    """Check whether a program has the name of a Python interpreter."""
    return bool(_PYTHON.match(os.path.basename(program)))


def _starts_python(argv: Sequence[str]) -> bool:
    if len(argv) < 2 or not is_python(argv[0]):
        return False
    return not argv[1].startswith("-") or (argv[1] == "-m" and len(argv) > 2)


def _srun(spec: JobSpec) -> str:
    return "\n".join(part for part in (_SRUN, inside(spec)) if part)


def _torchrun(spec: JobSpec) -> str:
    python = _starts_python(spec.argv)
    torchrun = f"{quote(spec.argv[0])} -m torch.distributed.run" if python else "torchrun"
    container = inside(spec)
    return _TORCHRUN.format(
        inside=f"{container}\n" if container else "",
        torchrun=torchrun,
        no_python="" if python else " --no-python",
    )


def _horovodrun(spec: JobSpec) -> str:
    del spec
    return _SLOTS + _HOROVODRUN


def _none(spec: JobSpec) -> str:
    """Return the lines that run the command once, on the first host, like the script."""
    del spec
    # env starts only programs, no builtins or functions of bash.
    return "launch=(env --) # only programs, no shell builtins"


def _elastic(spec: JobSpec) -> str:
    python, _ = python_script(spec.argv, "elastic")
    start = f"launch=({quote(python)} -m hpctrain run --elastic"
    if spec.launcher == "horovodrun":
        return f'{_SLOTS}\n{_ELASTIC_SSH}\n{start} --hosts "$slots")'
    return f"{_ELASTIC}\n{start})"


# A new launcher needs a function and a line here, and a name in LAUNCHERS of spec.py.
_LAUNCHERS: Mapping[str, Callable[[JobSpec], str]] = {
    "srun": _srun,
    "torchrun": _torchrun,
    "horovodrun": _horovodrun,
    "none": _none,
}
