"""Launcher that starts ranks on this machine, forwards their output, and ends them.

`rank_environment` makes the environment of each rank, `supervisor` starts the ranks and waits for
them, `rank_output` forwards their output with the rank in front, and `guard` ends the ranks if this
process is killed. `elastic` starts ranks on several hosts, and again on the remaining hosts, with
`over_ssh` or `in_slurm`. This package never imports torch.
"""

import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars
from hpctrain.errors import UsageError, exit_codes
from hpctrain.launch import elastic, rank_environment, supervisor
from hpctrain.launch.elastic import run_directory
from hpctrain.launch.hosts import Hosts, parse
from hpctrain.launch.in_slurm import InSlurm
from hpctrain.launch.over_ssh import OverSsh
from hpctrain.launch.rank_environment import AS, RealHost, gpus_of, layout
from hpctrain.launch.rank_output import TRACEBACK, write_stderr
from hpctrain.launch.spawning import spawn
from hpctrain.rundir.exit_status import read_exit_status, write_exit_status

__all__ = [
    "AS",
    "InSlurm",
    "OverSsh",
    "RealHost",
    "gpus_of",
    "layout",
    "parse",
    "run_directory",
    "spawn",
    "start",
    "start_elastic",
]


def start(
    command: Sequence[str],
    tasks_per_node: Sequence[int],
    env: Mapping[str, str],
    style: str = "hpctrain",
    gpus: Sequence[str] = (),
    host: RealHost | None = None,
) -> int:
    """Start a command once for each rank of this machine, and wait for all of them.

    Args:
        command: program and arguments, the same for all ranks.
        tasks_per_node: ranks on each host.
        env: environment to start from; variables of launchers are removed from it.
        style: one of `AS`; selects the launcher whose variables the ranks get.
        gpus: GPUs of this machine, as CUDA_VISIBLE_DEVICES names them. Each simulated host gets
            separate GPUs, or none if there are not enough for all ranks.
        host: this machine as one of several real hosts (default: all hosts are simulated on this
            machine, over loopback).

    Returns:
        The code of the exit status file if rank 0 has written one on this machine;
        `exit_codes.STOPPED` if a stop signal ended ranks before they handled it; else the exit code
        of the first rank that failed; else 128 plus the number of the signal that ended the ranks;
        0 on success.

    Raises:
        UsageError: there are more ranks than one machine may have.
        StartError: the system cannot start more processes.
    """
    environs = rank_environment.environs(tasks_per_node, env, style, gpus, host)
    rank_environment.print_threads(env, environs)
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        exit_status_file = Path(folder) / "exit-status"
        outcome = supervisor.run(
            command, environs, exit_status_file, labelled=sum(tasks_per_node) > 1
        )
        exit_status = read_exit_status(exit_status_file)
        if exit_status is None and outcome.stop_unhandled and outcome.signal is not None:
            name = signal.Signals(outcome.signal).name
            exit_status = exit_codes.STOPPED, f"{name} was received before the session was open"
    if not (exit_status and exit_status[0] == exit_codes.STOPPED):
        # The package's own commands, such as `-m hpctrain doctor`, train nothing.
        trains = list(command[1:3]) != ["-m", "hpctrain"]
        if trains and outcome.first is None and not outcome.sessions:
            _report_missing_sessions(len(outcome.ranks))
        _report_first_failure(outcome)
    _write_exit_status(exit_status, env.get(env_vars.EXIT_STATUS_FILE))
    # An exit status of 0 does not cover errors of a rank after its session.
    return exit_status[0] if exit_status and (exit_status[0] or not outcome.code) else outcome.code


def start_elastic(
    hosts: Hosts,
    command: Sequence[str],
    directory: Path,
    env: Mapping[str, str],
    least: int = 1,
) -> int:
    """Start a command on several hosts, and again on the remaining hosts when some are lost.

    Args:
        hosts: `OverSsh` or `InSlurm`.
        command: program and arguments; the program has to resume from `directory`.
        directory: run directory, on a file system that all hosts share.
        env: environment of the ranks.
        least: smallest number of ranks; with fewer the run is given up.

    Returns:
        An exit code of `exit_codes`, or the exit code of the last start.

    Raises:
        StartError: a host does not answer before the first start.
        UsageError: the run directory cannot be made.
    """
    exit_status = elastic.run(hosts, command, rundir.RunDirectory(directory), env, least)
    _write_exit_status(exit_status, env.get(env_vars.EXIT_STATUS_FILE))
    return exit_status[0]


def _report_missing_sessions(ranks: int) -> None:
    """Print that no rank of a start has opened a session."""
    if ranks > 1:
        write_stderr(
            f"hpctrain: none of the {ranks} ranks has opened a Session: unless the "
            "script connects them itself, each rank has trained alone\n"
            "  expected: with hpctrain.Session(…) as session: in the script\n"
            "  fix:      hpctrain run --as torchrun SCRIPT, for a script that reads RANK and "
            "WORLD_SIZE\n"
        )


def _report_first_failure(outcome: supervisor.Outcome) -> None:
    """Print which rank failed first, because its error is the cause of the other errors."""
    first = outcome.first
    if first is None or len(outcome.ranks) == 1:
        return
    # After a usage error every rank has printed the same few lines.
    if all(rank.code == UsageError.exit_code for rank in outcome.ranks):
        return
    only = not any(TRACEBACK in rank.tail.text() for rank in outcome.ranks if rank is not first)
    write_stderr(
        f"hpctrain: rank {first.number} failed first, {first.describe_end(brief=True, only=only)}\n"
    )


def _write_exit_status(exit_status: tuple[int, str] | None, path: str | None) -> None:
    """Write the exit status file of the process that started this one, if it waits for one."""
    if exit_status and path:
        try:
            write_exit_status(path, *exit_status)
        except OSError as error:
            sys.stderr.write(f"hpctrain: the exit status could not be written to {path}: {error}\n")
