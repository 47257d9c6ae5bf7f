"""Options of `hpctrain run`, and which of them fit together and to the place."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.cli.argument_types import count, port
from hpctrain.errors import UsageError

__all__ = [
    "AS",
    "OF_SLURM",
    "add_options",
    "check",
    "check_on_one_machine",
    "check_outside_of_a_job",
    "check_spares",
]

_ELASTIC = "in a batch script of Slurm: exec hpctrain run --elastic SCRIPT"
_MANUAL = "hpctrain run --nodes 2 --node-rank 0 --main-address HOST --main-port 8888 SCRIPT"
# Options that outside of a Slurm job would change nothing.
OF_SLURM = (
    *("direct", "once", "setting", "finish", "container", "container_env"),
    *("stage_code", "stage_environment", "stage_data", "elastic", "max_restarts"),
    *("requeue_plain", "spares"),
)
# Options that outside of a job would change nothing.
OF_A_JOB = (*OF_SLURM, "max_attempts", "retry")
# Options for what only agents do.
_OF_AGENTS = (
    *("nproc_per_node", "elastic", "spares"),
    *("stage_code", "stage_environment", "stage_data"),
)
# Values of --as, and the launcher whose variables the ranks get.
AS = {
    "hpctrain": "hpctrain",
    "slurm": "slurm",
    "torchrun": "torchrun",
    "mpi": "openmpi",
    "horovod": "horovodrun",
}

# Options in the order of the help: flag, name of the value (none for a switch), type, help.
_Option = tuple[str, str, Callable[[str], Any], str]
_IN_A_JOB: tuple[_Option, ...] = (
    ("--code", "TREE", str, "snapshot of the code to run, which hpctrain submit has made"),
    (
        *("--max-attempts", "N", count),
        "attempts in a row without a new checkpoint after which the run is given up (default: 3)",
    ),
    ("--max-restarts", "N", int, "largest number of requeues (default: no limit)"),
    ("--retry", "", bool, "start a program without a Session again, too, after it has failed"),
    (
        *("--requeue-plain", "", bool),
        "at the end of the time, end a program without a Session by SIGTERM and requeue the job; "
        "the program has to continue from its own checkpoints",
    ),
    ("--finish", "LINES", str, "lines of bash that run after the program has succeeded"),
    (
        *("--container", "IMAGE", str),
        "container image in which the ranks run: of Apptainer, or with --direct of Pyxis",
    ),
    (
        *("--container-env", "NAMES", str),
        "variables that override those of the image, separated by commas",
    ),
    (
        *("--stage-code", "DIR", str),
        "folder that each host copies to its own disk; the ranks start in it",
    ),
    (
        *("--stage-environment", "FILE.tar", str),
        "archive of an environment that each host unpacks",
    ),
    ("--stage-data", "DIR", str, "folder with data that each host copies to its own disk"),
    (
        *("--elastic", "", bool),
        "go on with the remaining hosts if one is lost; the program has to resume with fewer "
        "ranks (--elastic --global-batch N among its own options)",
    ),
    (
        *("--spares", "N", int),
        "hosts of the job that have no ranks until another one is lost (default: 0)",
    ),
    (
        *("--min-nproc", "N", count),
        "with --elastic: smallest number of ranks to go on (default: 1)",
    ),
)
_ON_SEVERAL_HOSTS: tuple[_Option, ...] = (
    ("--node-rank", "I", int, "number of this host, from 0"),
    ("--main-address", "HOST", str, "name or address of host 0"),
    ("--main-port", "PORT", port, "free port on host 0, from 1 to 65535"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, and the program with its arguments."""
    parser.allow_abbrev = False  # options after SCRIPT belong to the script
    parser.usage = "hpctrain run [options] SCRIPT.py ARGS | -m MODULE ARGS | -- PROGRAM ARGS"
    parser.description = (
        "Start a program once for each rank, and wait for all of them. On a machine without a "
        "launcher, the ranks start here. In a batch script, or in the shell of an allocation, "
        "they start on all hosts of the job. Inside of a task that srun, mpirun or another "
        "launcher has started, the program becomes one rank. The program finds the variables of "
        "torchrun and of horovodrun; it need not know hpctrain."
    )
    parser.add_argument(
        "--nproc-per-node",
        "--ntasks-per-node",
        metavar="M",
        help="ranks of each host: a number, a list such as 2,1, or auto: one for each GPU, or one "
        "if there is no GPU (default: the tasks of the job if it has several on a host, else auto)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="run directory (default: runs/NAME-JOBID, outside of a job runs/NAME-DATE-TIME)",
    )
    parser.add_argument(
        "--fresh-interpreters",
        action="store_true",
        help="start each rank as a new Python, which imports torch itself (default: several ranks "
        "on a host are copies of one process that has imported it)",
    )
    parser.add_argument(
        "--debug-rank",
        type=int,
        metavar="R",
        help="rank that has the terminal, for breakpoint(); on one machine (default: the only one)",
    )
    job = parser.add_argument_group("in a job of Slurm")
    way = job.add_mutually_exclusive_group()
    way.add_argument(
        "--direct",
        action="store_true",
        help="start each rank as a task of srun, as MPI needs it (default: an agent on each host)",
    )
    way.add_argument(
        "--once",
        action="store_true",
        help="start the program once, on the first host: it starts its ranks itself",
    )
    job.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="ARGS",
        help="arguments for one task of a job array; give it once for each task, from index 0 on",
    )
    _add(job, _IN_A_JOB)
    real = parser.add_argument_group(
        "one of several hosts without a scheduler: type the command on each"
    )
    _add(real, _ON_SEVERAL_HOSTS)
    simulated = parser.add_argument_group("simulated on this machine")
    simulated.add_argument("--nodes", type=count, metavar="N", help="number of hosts")
    simulated.add_argument(
        "--as",
        dest="style",
        choices=tuple(AS),
        help="launcher whose environment variables the ranks get",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add(group: Any, options: Sequence[_Option]) -> None:
    for flag, metavar, kind, text in options:
        if metavar:
            group.add_argument(flag, metavar=metavar, type=kind, help=text)
        else:
            group.add_argument(flag, action="store_true", help=text)


def check(arguments: argparse.Namespace) -> None:
    """Check whether options fit together.

    Raises:
        UsageError: options are missing, do not fit together, or would have no effect.
    """
    if arguments.min_nproc is not None and not arguments.elastic:
        raise UsageError("HT804.min-nproc-without-elastic", arguments=arguments)
    _check_several_hosts(arguments)
    # With --direct and --once there are no agents.
    way = "--direct" if arguments.direct else "--once" if arguments.once else None
    if way is not None:
        names = (*_OF_AGENTS, "container") if arguments.once else _OF_AGENTS
        if flag := _first_flag(arguments, names):
            raise UsageError("HT804.option-without-agents", flag=flag, way=way)


def check_outside_of_a_job(arguments: argparse.Namespace, names: Sequence[str] = OF_A_JOB) -> None:
    """Check whether there is no option of a job, where `hpctrain run` starts ranks without one.

    Raises:
        UsageError: an option would have no effect.
    """
    if flag := _first_flag(arguments, names):
        raise UsageError("HT804.option-outside-of-job", flag=flag)


def check_on_one_machine(arguments: argparse.Namespace) -> None:
    """Check whether there is no option of a start on one machine.

    Raises:
        UsageError: the ranks are on several hosts, or another launcher has started them.
    """
    if arguments.debug_rank is not None:
        raise UsageError("HT804.debug-rank-elsewhere")


def _first_flag(arguments: argparse.Namespace, names: Sequence[str]) -> str:
    """Return the flag of the first of these options that was given; empty if none was."""
    given = (name for name in names if getattr(arguments, name))
    return next(("--" + name.replace("_", "-") for name in given), "")


def check_spares(spares: int | None, hosts: Sequence[str]) -> None:
    """Check whether a host is left for the ranks.

    Raises:
        UsageError: the job has not as many hosts.
    """
    if spares is not None and not 0 <= spares < len(hosts):
        nodes, needed = len(hosts), len(hosts) + max(1, spares)
        raise UsageError("HT804.too-many-spares", spares=spares, nodes=nodes, needed=needed)


def _check_several_hosts(arguments: argparse.Namespace) -> None:
    """Check the options for one of several hosts without a scheduler.

    Raises:
        UsageError: options are missing, or do not fit together.
    """
    options = {
        "--node-rank": arguments.node_rank,
        "--main-address": arguments.main_address,
        "--main-port": arguments.main_port,
    }
    given = [name for name, value in options.items() if value is not None]
    needed = {"--nodes": arguments.nodes, **options}
    missing = [name for name, value in needed.items() if value is None]
    if not given:
        return
    if missing:
        present, absent = " and ".join(given), " and ".join(missing)
        raise UsageError("HT804.node-options-missing", present=present, missing=absent)
    if arguments.style is not None:
        raise UsageError("HT804.as-with-node-rank", arguments=arguments)
    if not 0 <= arguments.node_rank < arguments.nodes:
        raise UsageError("HT804.node-rank-out-of-range", arguments=arguments)
    if not arguments.main_address.strip():
        raise UsageError("HT804.empty-main-address")
