"""Starts of `hpctrain run`: on this machine, and on all hosts of an allocation."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars, launchers
from hpctrain.cluster.job import detect as detect_job
from hpctrain.cluster.launchers import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError, exit_codes
from hpctrain.launch import (
    job_supervisor,
    peers,
    rank_environment,
    script_source,
    supervisor,
    warm_imports,
)
from hpctrain.launch.end import End
from hpctrain.launch.job_hosts import JobHosts
from hpctrain.launch.plan import Plan
from hpctrain.launch.rank_output import announce
from hpctrain.launch.stores import Stores
from hpctrain.rundir.exit_status import write_exit_status

__all__ = [
    "as_agent",
    "on_hosts",
    "on_one_of_several_hosts",
    "on_this_machine",
    "run_directory",
    "simulated",
]


def on_this_machine(
    command: Sequence[str], nproc: str, env: Mapping[str, str], debug_rank: int | None = None
) -> int:
    """Start the ranks on this machine, wait for all of them, and return the exit code.

    Args:
        command: program and arguments, the same for all ranks.
        nproc: number of ranks, as `rank_environment.layout` takes it.
        env: environment to start from; variables of launchers are removed from it.
        debug_rank: number of the rank that has the terminal, for a debugger (default: the only
            one).

    Returns:
        The code of the exit status file if rank 0 has written one; `exit_codes.STOPPED` if a stop
        signal ended ranks before they handled it; else the exit code of the first rank that failed;
        else 128 plus the number of the signal that ended the ranks; 0 on success.

    Raises:
        UsageError: there are more ranks than one machine may have, or no rank `debug_rank`.
        StartError: the system cannot start more processes.
    """
    gpus = rank_environment.gpus_of(env)
    counts = rank_environment.layout(nproc, [len(gpus)])
    return simulated(command, counts, env, "hpctrain", gpus, debug_rank)


def on_one_of_several_hosts(
    command: Sequence[str],
    nproc: str,
    env: Mapping[str, str],
    node_rank: int,
    nodes: int,
    main_address: str,
    main_port: int,
) -> int:
    """Start the ranks of this host, one of several with an `hpctrain run` on each.

    Args:
        command, nproc, env: as for `on_this_machine`.
        node_rank: number of this host, from 0.
        nodes: number of hosts.
        main_address: name or address of the host with node rank 0, reachable from all hosts.
        main_port: port on which the first host listens for the others.

    Returns:
        As for `on_this_machine`.

    Raises:
        UsageError, StartError: as for `on_this_machine`, or not all hosts have connected.
    """
    if nproc != "auto":
        rank_environment.layout(nproc, [0] * nodes)  # before this host waits for the others
    world = World(node_rank, nodes, 0, 1, node_rank, nodes)
    point = RendezvousPoint(
        # The address is the only value that all hosts of one start share.
        key=f"hpctrain-agents/{main_address}:{main_port}",
        host=env.get(env_vars.HOSTNAME) or socket.gethostname(),
        address=main_address,
        port=main_port,
        only_port=True,
        interface=env.get(env_vars.INTERFACE) or None,
        simulated=bool(env.get(env_vars.HOSTNAME)),
        secret=env.get(env_vars.SECRET, ""),
    )
    return _host(command, nproc, env, world, point)


def as_agent(
    command: Sequence[str], nproc: str, env: Mapping[str, str], start: launchers.Start
) -> int:
    """Start the ranks of this host, in a task that another launcher has started on each host.

    Args:
        command, nproc, env: as for `on_this_machine`.
        start: start of this process.

    Returns:
        As for `on_this_machine`.

    Raises:
        UsageError, StartError: as for `on_one_of_several_hosts`.
    """
    if start.stray is not None:
        raise start.stray
    return _host(command, nproc, env, start.world, start.rendezvous_point)


def _host(
    command: Sequence[str],
    nproc: str,
    env: Mapping[str, str],
    world: World,
    point: RendezvousPoint,
) -> int:
    end = peers.run(Plan(command, "", temporary=True), nproc, world, point, env)
    return _conclude(end, command, env)


def simulated(
    command: Sequence[str],
    tasks_per_node: Sequence[int],
    env: Mapping[str, str],
    launcher: str,
    gpus: Sequence[str],
    debug_rank: int | None = None,
) -> int:
    """Start ranks as if this machine were several hosts, or as another launcher would.

    Args:
        command: program and arguments, the same for all ranks.
        tasks_per_node: number of ranks on each simulated host.
        env: environment to start from; variables of launchers are removed from it.
        launcher: name of the launcher whose variables the ranks get.
        gpus: GPUs of this machine, as CUDA_VISIBLE_DEVICES names them. Each simulated host gets
            separate GPUs, or none if there are not enough for all ranks.
        debug_rank: as for `on_this_machine`.

    Returns:
        As for `on_this_machine`.

    Raises:
        UsageError, StartError: as for `on_this_machine`.
    """
    ranks = sum(tasks_per_node)
    if debug_rank is not None and not 0 <= debug_rank < ranks:
        raise UsageError("HT804.debug-rank-out-of-range", debug_rank=debug_rank, last=ranks - 1)
    terminal = 0 if debug_rank is None and ranks == 1 and _in_terminal() else debug_rank
    stores = Stores(local=True) if launcher == "hpctrain" else None
    try:
        ports = stores.ports if stores else None
        environs = rank_environment.environs(tasks_per_node, env, launcher, gpus, ports)
        source = script_source.read(command, os.getcwd(), environs[0])
        if ports is not None:  # another launcher does nothing for a script
            source.check(ranks)
            source.announce()
            environs = {n: {**one, **source.environ(one, ports[2])} for n, one in environs.items()}
        rank_environment.print_threads(env, ranks)
        imports = warm_imports.of_command(source, command, os.getcwd(), list(environs.values()))
        with tempfile.TemporaryDirectory(prefix="hpctrain-") as name:
            end = supervisor.run(
                command,
                environs,
                Path(name),
                labelled=len(environs) > 1,
                stores=stores,
                imports=imports,
                terminal=terminal,
                host=socket.gethostname(),
                source=source,
            )
            end = replace(end, connected=end.connected or (stores is not None and stores.used))
            return _conclude(end, command, env, launcher not in ("hpctrain", "torchrun"))
    finally:
        if stores is not None:
            stores.close()


def _in_terminal() -> bool:
    """Return whether a person can type to this process: it has a terminal, and is in front."""
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        return os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _conclude(
    end: End, command: Sequence[str], env: Mapping[str, str], simulates: bool = False
) -> int:
    """Return the exit code of a start on this machine, and report what a person has to know."""
    exit_status = end.recorded
    if exit_status is None and end.stop_unhandled and end.signal is not None:
        name = signal.Signals(end.signal).name
        exit_status = exit_codes.STOPPED, f"{name} was received before the session was open"
    if not (exit_status and exit_status[0] == exit_codes.STOPPED):
        if text := end.alone(command, simulates):
            announce(text)
        if end.rank is not None and end.ranks > 1 and not end.usage:
            announce(f"rank {end.rank} {end.conclusion}")
    _write_exit_status(exit_status, env.get(env_vars.EXIT_STATUS_FILE))
    # An exit status of 0 does not cover errors of a rank after its session.
    return exit_status[0] if exit_status and (exit_status[0] or not end.code) else end.code


def on_hosts(
    hosts: JobHosts,
    plan: Plan,
    directory: Path,
    env: Mapping[str, str],
    received: Sequence[int] = (),
) -> tuple[int, str]:
    """Start a command on the hosts of an allocation, and again after a failure.

    Args:
        hosts: hosts of the allocation.
        plan: plan of the launch; a program that is started again has to resume from `directory`.
        directory: run directory, on a file system that all hosts share.
        env: environment of the ranks.
        received: stop signals that this process has received so far.

    Returns:
        An exit code of `exit_codes` or the exit code of the last attempt, and the reason.

    Raises:
        StartError: a host does not answer before the first attempt.
        UsageError: the run directory cannot be made.
    """
    run_directory = rundir.RunDirectory(directory)
    exit_status = job_supervisor.run(hosts, plan, run_directory, env, received)
    _write_exit_status(exit_status, env.get(env_vars.EXIT_STATUS_FILE))
    return exit_status


def run_directory(arguments: Sequence[str], script: str, env: Mapping[str, str]) -> Path:
    """Return the run directory of all attempts: `--run-dir`, $HPCTRAIN_RUN_DIR or default.

    Args:
        arguments: arguments of the script, which may have `--run-dir`.
        script: name of the script or module.
        env: environment of this process.
    """
    if given := rundir.given(arguments):
        return Path(given)
    if env.get(env_vars.RUN_DIR):
        return Path(env[env_vars.RUN_DIR])
    job = detect_job(env)
    return Path(rundir.default(Path(script).stem, job.label if job else None))


def _write_exit_status(exit_status: tuple[int, str] | None, path: str | None) -> None:
    """Write the exit status file of the process that started this one, if it waits for one."""
    if exit_status and path:
        try:
            write_exit_status(path, *exit_status)
        except OSError as error:
            announce(f"the exit status could not be written to {path}: {error}")
