"""`hpctrain run`: start the ranks of a program where it stands.

The place decides: on a machine without a launcher, ranks here; in a batch script or an allocation's
shell, ranks on all hosts of the job; inside of a rank, the program in its place.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.cli.argument_types import count, port
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.launch.attempts import Policy
    from hpctrain.launch.job_hosts import JobHosts

__all__ = ["add"]

_ELASTIC = "in a batch script of Slurm: exec hpctrain run --elastic SCRIPT"
_MANUAL = "hpctrain run --nodes 2 --node-rank 0 --main-address HOST --main-port 8888 SCRIPT"
# Options that outside of a Slurm job would change nothing.
_OF_SLURM = (
    *("direct", "once", "setting", "finish", "container", "container_env"),
    *("stage_code", "stage_environment", "stage_data", "elastic", "max_restarts"),
    *("requeue_plain", "spares"),
)
# Options that outside of a job would change nothing.
_OF_A_JOB = (*_OF_SLURM, "max_attempts", "retry")
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


class _Program(NamedTuple):
    """What the ranks run: the command of each, the name of the script, and its arguments."""

    command: list[str]
    name: str
    arguments: list[str]


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


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
        choices=AS,
        help="launcher whose environment variables the ranks get",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=_reported)


def _add(group: Any, options: Sequence[_Option]) -> None:
    for flag, metavar, kind, text in options:
        if metavar:
            group.add_argument(flag, metavar=metavar, type=kind, help=text)
        else:
            group.add_argument(flag, action="store_true", help=text)


def _reported(arguments: argparse.Namespace) -> int:
    """Run the command; an error that all tasks of a launcher have is printed by one of them."""
    try:
        return _main(arguments)
    except UsageError as error:
        from hpctrain.rendezvous import shared_errors

        shared_errors.report(error, sys.stderr)
        return error.exit_code


def _main(arguments: argparse.Namespace) -> int:
    from hpctrain.cluster import env_vars
    from hpctrain.cluster.launchers import Process

    program = _program(arguments)
    nproc = arguments.nproc_per_node
    env = Process.current().own(os.environ)
    if arguments.run_dir:
        env[env_vars.RUN_DIR] = env.get(env_vars.RUN_DIR) or arguments.run_dir
    _check_combination(arguments)
    _check_way(arguments)
    if arguments.node_rank is not None:
        from hpctrain.launch import starts

        _check_outside_of_a_job(arguments)
        return starts.on_one_of_several_hosts(
            program.command, nproc or "auto", env, arguments.node_rank, arguments.nodes,
            arguments.main_address, arguments.main_port,
        )  # fmt: skip
    if arguments.nodes is not None or arguments.style is not None:
        _check_outside_of_a_job(arguments)
        return _simulated(arguments, program.command, env)
    return _by_place(arguments, program, env)


def _by_place(arguments: argparse.Namespace, program: _Program, env: Mapping[str, str]) -> int:
    from hpctrain.cluster import env_vars, launchers

    start = launchers.survey()
    name = start.world.launcher
    # The shell of `srun --pty`, or a notebook's kernel under srun, has the variables of a rank.
    shell = name == "slurm" and any(map(env.get, env_vars.OF_A_SHELL))
    nproc = arguments.nproc_per_node
    if name not in ("none", "hpctrain") and not shell:
        _check_outside_of_a_job(arguments)
        if nproc is None:
            from hpctrain.launch.joined_rank import join

            join(program.command, start, env)
        from hpctrain.launch import starts

        return starts.as_agent(program.command, nproc, env, start)
    from hpctrain.launch import starts

    alone = name == "hpctrain" or env.get(env_vars.LAUNCHER) == "none"
    if start.allocation is not None and start.allocation.scheduler == "slurm" and not alone:
        return _in_slurm(arguments, program)
    if not alone:
        from hpctrain.launch.in_other_jobs import hosts_of

        hosts = hosts_of(env, nproc)
        if hosts is not None:
            _check_outside_of_a_job(arguments, _OF_SLURM)
            return _in_other_job(hosts, arguments, program, env)
    _check_outside_of_a_job(arguments)
    return starts.on_this_machine(program.command, nproc or "auto", env)


def _in_other_job(
    hosts: "JobHosts", arguments: argparse.Namespace, program: _Program, env: Mapping[str, str]
) -> int:
    """Start the ranks on the hosts of a job of another scheduler, which does not requeue it."""
    from hpctrain.launch import starts
    from hpctrain.launch.slurm_job import stop_signals

    with stop_signals(in_batch=True) as received:
        directory = starts.run_directory(program.arguments, program.name, env)
        policy = _policy(arguments)
        return starts.on_hosts(hosts, program.command, directory, env, policy, received)[0]


def _in_slurm(arguments: argparse.Namespace, program: _Program) -> int:
    """Start the ranks on the hosts of the job, and requeue the job if it was stopped."""
    from hpctrain.cluster import env_vars
    from hpctrain.cluster.launchers import Process
    from hpctrain.launch import starts
    from hpctrain.launch.in_slurm import Direct, InSlurm, Once
    from hpctrain.launch.job_hosts import Inside
    from hpctrain.launch.slurm_job import SlurmJob, stop_signals

    own = Process.current().own(os.environ)
    in_batch = own.get("ENVIRONMENT") == "BATCH" and not own.get(env_vars.KERNEL)
    with stop_signals(in_batch) as received:
        job = SlurmJob.here(own, arguments.max_restarts)
        env = dict(job.env)
        setting = _setting(arguments.setting, job.allocation.array_task)
        if "--run-dir" in " ".join(program.arguments) or not (in_batch or arguments.run_dir):
            directory = starts.run_directory(program.arguments, program.name, env)
        else:
            directory = job.run_directory(arguments.run_dir)
        names = tuple(filter(None, (arguments.container_env or "").split(",")))
        for name in names:
            env[f"APPTAINERENV_{name}"] = env.get(name, "")
        command = program.command
        if arguments.code:
            command, env = _frozen(arguments, command, env)
        staged = (arguments.stage_code, arguments.stage_environment, arguments.stage_data)
        staging = [place or "" for place in staged]
        label = f"{job.allocation.label}-{job.allocation.restart_count}"
        inside = Inside(staging, arguments.container or "", names, label)
        kind = Direct if arguments.direct else Once if arguments.once else InSlurm
        hosts = kind(env, arguments.nproc_per_node, inside)
        _check_spares(arguments.spares, hosts.names)
        code, reason = starts.on_hosts(
            hosts, [*command, *setting], directory, env, _policy(arguments), received
        )
        if code == 0 and arguments.finish:
            return _finish(arguments.finish, {**env, env_vars.RUN_DIR: str(directory.absolute())})
        return job.after(code, reason, directory) if in_batch else code


def _finish(lines: str, env: Mapping[str, str]) -> int:
    """Run lines of bash, and return their exit code, as in a shell."""
    code = subprocess.run(["bash", "-e", "-c", lines], env=env, check=False).returncode
    return code if code >= 0 else 128 - code


def _frozen(
    arguments: argparse.Namespace, command: list[str], env: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of ranks that run the code of a snapshot."""
    from hpctrain.cluster.job import submit_folder
    from hpctrain.launch.frozen_program import from_snapshot
    from hpctrain.rundir import frozen_code

    store = submit_folder(env) / frozen_code.STORE
    folder = frozen_code.files(store, arguments.code)
    snapshot = frozen_code.read(store, arguments.code)
    if arguments.stage_code:
        place = snapshot.place_of(arguments.stage_code, folder)
        arguments.stage_code = str(place or arguments.stage_code)
        return command, env  # the copy has the code, and the ranks start there
    return from_snapshot(command, snapshot, folder, env)


def _setting(settings: Sequence[str], index: int | None) -> list[str]:
    """Return the arguments of this task of an array.

    Raises:
        UsageError: there is no setting for it.
    """
    if not settings:
        return []
    if index is None or index >= len(settings):
        raise UsageError(
            "HT804",
            f"{len(settings)} settings, and "
            + ("no job array" if index is None else f"the index {index}"),
            "a setting for each index, from 0 on",
            f"sbatch --array=0-{len(settings) - 1} SCRIPT",
        )
    return shlex.split(settings[index])


def _program(arguments: argparse.Namespace) -> _Program:
    """Return what the ranks run.

    Raises:
        UsageError: there is no program, or the script cannot be read.
    """
    words = list(arguments.program)
    is_program = words[:1] == ["--"]
    words = words[1:] if is_program else words
    if not words:
        raise UsageError(
            "HT805",
            "no program",
            "a script, a module or a program",
            "hpctrain run SCRIPT.py",
            "hpctrain run -m MODULE",
            "hpctrain run -- PROGRAM",
        )
    if is_program and not arguments.module:
        return _Program(words, words[0], words[1:])
    # The Python of a container or of an unpacked environment is the first one in its PATH.
    elsewhere = arguments.container or arguments.stage_environment
    python = "python" if elsewhere else sys.executable
    if arguments.module:
        return _Program([python, "-m", *words], words[0].rpartition(".")[2], words[1:])
    if not (arguments.code or arguments.container):  # else it is in the snapshot or the image
        _check_script(os.path.join(arguments.stage_code or "", words[0]))
    return _Program([python, *words], words[0], words[1:])


def _policy(arguments: argparse.Namespace) -> "Policy":
    from hpctrain.launch.attempts import Policy

    return Policy(
        arguments.max_attempts or 3,
        arguments.retry,
        arguments.elastic,
        arguments.min_nproc or 1,
        arguments.requeue_plain,
        arguments.spares or 0,
    )


def _simulated(
    arguments: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> int:
    from hpctrain.launch import rank_environment, starts

    nodes = arguments.nodes or 1
    gpus = rank_environment.gpus_of(env)
    counts = rank_environment.layout(
        arguments.nproc_per_node or "auto", [len(gpus) // nodes] * nodes
    )
    return starts.simulated(command, counts, env, AS[arguments.style or "hpctrain"], gpus)


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        found = f"{script} is no file but a folder" if script else "an empty name for the script"
    elif not path.exists():
        found = f"{script} is no file"
    elif not os.access(path, os.R_OK):
        found = f"{script} cannot be read by this user"
    else:
        return
    form = "-m hpctrain" if path.name == "hpctrain" else "SCRIPT"
    fixes = [f"hpctrain run [options] {form} [its arguments]"]
    if os.environ.get("SLURM_JOB_ID") and not path.is_absolute():
        found += f" in {os.getcwd()}"
        fixes.append("sbatch from the folder to which the script's path belongs")
    raise UsageError("HT805", found, "a Python script", *fixes)


def _check_outside_of_a_job(
    arguments: argparse.Namespace, names: Sequence[str] = _OF_A_JOB
) -> None:
    """Check whether there is no option of a job, where `hpctrain run` starts ranks without one.

    Raises:
        UsageError: an option would have no effect.
    """
    where = "outside of a batch script of Slurm and of the shell of salloc"
    _refuse(arguments, names, where, "ranks on all hosts of a job")


def _refuse(
    arguments: argparse.Namespace, names: Sequence[str], where: str, expected: str, *fixes: str
) -> None:
    """Raise UsageError if one of these options was given where it would have no effect."""
    for name in names:
        if getattr(arguments, name):
            flag = "--" + name.replace("_", "-")
            fix = f"hpctrain run without {flag}"
            raise UsageError("HT804", f"{flag} {where}", expected, fix, *fixes)


def _check_spares(spares: int | None, hosts: Sequence[str]) -> None:
    """Check whether a host is left for the ranks.

    Raises:
        UsageError: the job has not as many hosts.
    """
    if spares is not None and not 0 <= spares < len(hosts):
        raise UsageError(
            "HT804",
            f"--spares {spares} in a job of {len(hosts)} hosts",
            f"a number from 0 to {len(hosts) - 1}: the ranks start on the other hosts",
            f"#SBATCH --nodes={len(hosts) + max(1, spares)} --no-kill",
        )


def _check_way(arguments: argparse.Namespace) -> None:
    """Check whether there is no option for agents with --direct or --once, which start none.

    Raises:
        UsageError: an option would have no effect.
    """
    way = "--direct" if arguments.direct else "--once" if arguments.once else None
    if way is not None:
        names = (*_OF_AGENTS, "container") if arguments.once else _OF_AGENTS
        expected = "ranks that the agents of hpctrain run start"
        _refuse(arguments, names, f"with {way}", expected, f"hpctrain run without {way}")


def _check_combination(arguments: argparse.Namespace) -> None:
    """Check whether options that belong together are there.

    Raises:
        UsageError: options are missing, or do not fit together.
    """
    if arguments.min_nproc is not None and not arguments.elastic:
        raise UsageError("HT804", "--min-nproc without --elastic", "both", _ELASTIC)
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
        found = f"{' and '.join(given)} without {' and '.join(missing)}"
        expected = (
            "all of them for one of several real hosts, or --nodes alone to simulate hosts here"
        )
    elif arguments.style is not None:
        found = f"--as {arguments.style} together with --node-rank"
        expected = "one of them: --as simulates all hosts on this machine"
    elif not 0 <= arguments.node_rank < arguments.nodes:
        found = f"--node-rank {arguments.node_rank} of --nodes {arguments.nodes}"
        expected = f"a node rank from 0 to {arguments.nodes - 1}, another one on each host"
    elif not arguments.main_address.strip():
        found, expected = "an empty --main-address", "name or address of host 0"
    else:
        return
    raise UsageError("HT804", found, expected, _MANUAL)
