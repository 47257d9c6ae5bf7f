"""Who each rank of a start is, and the environment that says so."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster import env_vars
from hpctrain.cluster import visible_gpus as devices
from hpctrain.cluster.launchers import LAUNCHERS
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.launch.rank_output import say

__all__ = ["AS", "MOST_RANKS", "RealHost", "environs", "gpus_of", "layout", "tell_threads"]

Environ = Mapping[str, str]

# What `--as` takes, and the launcher whose variables the ranks get then.
AS = {
    "hpctrain": "hpctrain",
    "slurm": "slurm",
    "torchrun": "torchrun",
    "mpi": "openmpi",
    "horovod": "horovodrun",
}

# More on one machine is a slip of the finger, and each is a Python process of its own.
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class RealHost:
    """This machine as one of several real ones, each with a start of its own.

    Attributes:
        node_rank: which one, from 0.
        main_address: name or address of the host with node rank 0, as all hosts reach it.
        main_port: the first port to try there.
    """

    node_rank: int
    main_address: str
    main_port: int


def layout(nodes: int, per_node: str, gpus: int, simulated: bool = True) -> tuple[int, ...]:
    """The number of ranks on each host.

    Args:
        nodes: hosts.
        per_node: a number, `auto` (this machine's GPUs, or one rank where there is none), or a
            list such as `2,1` with a number for each host.
        gpus: of this machine.
        pretended: whether the hosts share this machine, and so its GPUs.

    Raises:
        UsageError: no number, none at all, a list of another length, or more ranks than a machine
            takes.
    """
    if per_node == "auto":
        return (max(gpus // nodes if simulated else gpus, 1),) * nodes
    try:
        counts = tuple(int(piece) for piece in per_node.split(","))
    except ValueError:
        counts = ()
    if len(counts) == 1:
        counts *= nodes
    if len(counts) != nodes or any(count < 1 for count in counts):
        raise UsageError(
            f"--nproc-per-node {per_node} for {nodes} node{'s' if nodes > 1 else ''}",
            "a number from 1 on, auto, or as many numbers with commas as there are nodes",
            "--nproc-per-node 2    or: --nodes 2 --nproc-per-node 2,1",
        )
    return counts


def gpus_of(env: Environ) -> list[str]:
    """The GPUs of this machine, without torch: those that are visible, else the devices."""
    visible = devices.visible(env)
    return devices.here() if visible is None else list(visible.names)


def environs(
    tasks_per_node: Sequence[int],
    env: Environ,
    style: str,
    gpus: Sequence[str],
    host: RealHost | None,
) -> dict[int, dict[str, str]]:
    """The environment of each rank of this machine, by rank; see `start` for the arguments."""
    worlds = _worlds(tasks_per_node, host)
    if len(worlds) > MOST_RANKS:
        raise UsageError(
            f"{len(worlds)} ranks on this machine", f"at most {MOST_RANKS}", "--nproc-per-node 2"
        )
    launcher = next(one for one in LAUNCHERS if one.name == AS[style])
    start = secrets.randbelow(2**31)
    common = _common(env, style, threads(len(worlds)))
    if host is None:
        common[env_vars.SECRET] = secrets.token_hex(16)
    found = {}
    for world in worlds:
        environ = {**common, **launcher.environ(world, tasks_per_node, start)}
        if host is None:
            environ |= _simulated(world, tasks_per_node, gpus)
        else:
            environ |= _real(host, env)
        found[world.rank] = environ
    return found


def threads(ranks: int) -> int:
    """Of each rank: several ranks that each take all cores are slower than one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def tell_threads(env: Environ, ranks: Sequence[int] | Mapping[int, object]) -> None:
    """Say how many threads each rank has, where nobody decided and there are several ranks."""
    if len(ranks) > 1 and "OMP_NUM_THREADS" not in env:
        cores = len(os.sched_getaffinity(0))
        say(
            f"hpctrain: OMP_NUM_THREADS={threads(len(ranks))} for each of {len(ranks)} ranks: "
            f"{cores} core{'s' if cores > 1 else ''}\n"
        )


def _common(env: Environ, style: str, threads: int) -> dict[str, str]:
    """What all ranks get: a clean environment, the scheduler's job, their share of the cores."""
    environ = env_vars.scrubbed(env)
    if style == "hpctrain":
        environ |= env_vars.of_the_job(env)  # a pretended launcher brings a job of its own
    if env_vars.STOP in env:
        environ[env_vars.STOP] = env[env_vars.STOP]  # who stops the whole stops its ranks
    if env.get(env_vars.LAUNCHER) == AS[style]:
        environ[env_vars.LAUNCHER] = AS[style]  # the word of a person who was told to say so
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    environ.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold lines back
    return environ


def _simulated(world: World, tasks_per_node: Sequence[int], gpus: Sequence[str]) -> dict[str, str]:
    """What makes a part of this machine a host: a name, a way to rank 0, GPUs of its own."""
    environ = {env_vars.MAIN_ADDRESS: "127.0.0.1"}
    if len(tasks_per_node) == 1 or not world.hosts or world.node_rank is None:
        return environ
    environ[env_vars.HOSTNAME] = world.hosts[world.node_rank]
    if sum(tasks_per_node) <= len(gpus):
        first = sum(tasks_per_node[: world.node_rank])
        own = gpus[first : first + tasks_per_node[world.node_rank]]
        environ[devices.CUDA] = ",".join(own)
    elif gpus:
        environ[devices.CUDA] = ""  # real hosts do not share theirs
    return environ


def _real(host: RealHost, env: Environ) -> dict[str, str]:
    """Where the hosts meet; nobody but a person can tell."""
    environ = {
        # There is nothing else that all hosts of one start share.
        env_vars.START: f"{host.main_address}:{host.main_port}",
        env_vars.MAIN_ADDRESS: host.main_address,
        env_vars.MAIN_PORT: str(host.main_port),
    }
    if env.get(env_vars.HOSTNAME):
        environ[env_vars.HOSTNAME] = env[env_vars.HOSTNAME]
    return environ


def _worlds(tasks_per_node: Sequence[int], host: RealHost | None) -> list[World]:
    """The ranks of this machine. The names of other real hosts are left to the rendezvous."""
    nodes = len(tasks_per_node)
    hosts: tuple[str, ...] | None = tuple(f"node{index + 1}" for index in range(nodes))
    if host is not None:
        hosts = None
    elif nodes == 1:
        hosts = (os.uname().nodename,)
    return [
        World(
            rank=sum(tasks_per_node[:node_rank]) + local_rank,
            world_size=sum(tasks_per_node),
            local_rank=local_rank,
            local_world_size=tasks_per_node[node_rank],
            node_rank=node_rank,
            num_nodes=nodes,
            hosts=hosts,
        )
        for node_rank in (range(nodes) if host is None else (host.node_rank,))
        for local_rank in range(tasks_per_node[node_rank])
    ]
