"""World of each rank of a start, and the environment that describes it."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster import env_vars
from hpctrain.cluster import visible_gpus as devices
from hpctrain.cluster.launchers import LAUNCHERS
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.launch.rank_output import write_stderr

__all__ = ["AS", "MOST_RANKS", "RealHost", "environs", "gpus_of", "layout", "print_threads"]

Environ = Mapping[str, str]

# Values of `--as`, and the launcher whose variables the ranks get.
AS = {
    "hpctrain": "hpctrain",
    "slurm": "slurm",
    "torchrun": "torchrun",
    "mpi": "openmpi",
    "horovod": "horovodrun",
}

# Each rank is a Python process; a larger number on one machine is probably a typing error.
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class RealHost:
    """This machine as one of several real hosts, with a separate `hpctrain run` on each.

    Attributes:
        node_rank: number of this host, from 0.
        main_address: name or address of the host with node rank 0, reachable from all hosts.
        main_port: first port to try there.
    """

    node_rank: int
    main_address: str
    main_port: int


def layout(nodes: int, per_node: str, gpus: int, simulated: bool = True) -> tuple[int, ...]:
    """Return the number of ranks on each host.

    Args:
        nodes: number of hosts.
        per_node: a number, `auto` (one rank per GPU of this machine, or one rank without GPUs), or
            a list such as `2,1` with a number for each host.
        gpus: number of GPUs of this machine.
        simulated: whether the hosts share this machine, and so its GPUs.

    Raises:
        UsageError: `per_node` is not a number from 1 on, or a list of another length.
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
            "HT213",
            f"--nproc-per-node {per_node} for {nodes} node{'s' if nodes > 1 else ''}",
            "a number from 1 on, auto, or as many numbers with commas as there are nodes",
            "--nproc-per-node 2",
            "--nodes 2 --nproc-per-node 2,1",
        )
    return counts


def gpus_of(env: Environ) -> list[str]:
    """Return the visible GPUs of this machine, else its GPU devices, without torch."""
    visible = devices.visible(env)
    return devices.here() if visible is None else list(visible.names)


def environs(
    tasks_per_node: Sequence[int],
    env: Environ,
    style: str,
    gpus: Sequence[str],
    host: RealHost | None,
) -> dict[int, dict[str, str]]:
    """Return the environment of each rank of this machine; see `start` for the arguments."""
    worlds = _worlds(tasks_per_node, host)
    if len(worlds) > MOST_RANKS:
        raise UsageError(
            "HT213",
            f"{len(worlds)} ranks on this machine",
            f"at most {MOST_RANKS}",
            "--nproc-per-node 2",
        )
    launcher = next(kind for kind in LAUNCHERS if kind.name == AS[style])
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
    """Return the threads per rank: several ranks that each use all cores are slower than one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def print_threads(env: Environ, ranks: Sequence[int] | Mapping[int, object]) -> None:
    """Print the threads per rank, for several ranks without OMP_NUM_THREADS in `env`."""
    if len(ranks) > 1 and "OMP_NUM_THREADS" not in env:
        cores = len(os.sched_getaffinity(0))
        write_stderr(
            f"hpctrain: OMP_NUM_THREADS={threads(len(ranks))} for each of {len(ranks)} ranks: "
            f"{cores} core{'s' if cores > 1 else ''}\n"
        )


def _common(env: Environ, style: str, threads: int) -> dict[str, str]:
    """Return the environment common to all ranks: scheduler job, share of the cores."""
    environ = env_vars.scrubbed(env)
    if style == "hpctrain":
        environ |= env_vars.of_the_job(env)  # a simulated launcher defines its own job
    if env_vars.STOP_FILE in env:
        environ[env_vars.STOP_FILE] = env[
            env_vars.STOP_FILE
        ]  # a stop file for the start is for its ranks
    if env.get(env_vars.LAUNCHER) == AS[style]:
        environ[env_vars.LAUNCHER] = AS[style]  # a choice of the user, as an error suggested
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    environ.setdefault("PYTHONUNBUFFERED", "1")  # Python buffers output to a pipe
    return environ


def _simulated(world: World, tasks_per_node: Sequence[int], gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables of a simulated host: its name, rank 0's address, its GPUs."""
    environ = {env_vars.MAIN_ADDRESS: "127.0.0.1"}
    if len(tasks_per_node) == 1 or not world.hosts or world.node_rank is None:
        return environ
    environ[env_vars.HOSTNAME] = world.hosts[world.node_rank]
    if sum(tasks_per_node) <= len(gpus):
        first = sum(tasks_per_node[: world.node_rank])
        own = gpus[first : first + tasks_per_node[world.node_rank]]
        environ[devices.CUDA] = ",".join(own)
    elif gpus:
        environ[devices.CUDA] = ""  # real hosts do not share GPUs
    return environ


def _real(host: RealHost, env: Environ) -> dict[str, str]:
    """Return the rendezvous address of real hosts, which only the user can give."""
    environ = {
        # The address is the only value that all hosts of one start share.
        env_vars.START: f"{host.main_address}:{host.main_port}",
        env_vars.MAIN_ADDRESS: host.main_address,
        env_vars.MAIN_PORT: str(host.main_port),
    }
    if env.get(env_vars.HOSTNAME):
        environ[env_vars.HOSTNAME] = env[env_vars.HOSTNAME]
    return environ


def _worlds(tasks_per_node: Sequence[int], host: RealHost | None) -> list[World]:
    """Return the ranks of this machine; the rendezvous finds the names of other real hosts."""
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
