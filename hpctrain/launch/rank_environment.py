"""World of each rank of a start, and the environment that describes it."""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.cluster import env_vars
from hpctrain.cluster import visible_gpus as devices
from hpctrain.cluster.launchers import LAUNCHERS
from hpctrain.cluster.launchers.frameworks import Horovodrun, HpctrainRun, Torchrun
from hpctrain.cluster.launchers.slurm import SlurmStep
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.launch import cores
from hpctrain.launch.rank_output import announce
from hpctrain.rendezvous.addresses import LOOPBACK
from hpctrain.rendezvous.interfaces import interface_of

__all__ = [
    "environs",
    "environs_of_host",
    "gpus_of",
    "layout",
    "of_rank",
    "print_threads",
]

Environ = Mapping[str, str]

# Variables of a task of srun that differ from those of the agent. The ids are those of the job.
_OF_A_TASK = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS"),
    *("SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_TASKS_PER_NODE"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"),
)

# Each rank is a Python process; a larger number on one machine is probably a typing error.
_MOST_RANKS = 1024


def layout(per_node: str, gpus: Sequence[int]) -> tuple[int, ...]:
    """Return the number of ranks on each host.

    Args:
        per_node: a number, `auto` (one rank for each GPU, or one rank without GPUs), or a list such
            as `2,1` with a number for each host.
        gpus: number of GPUs of each host.

    Raises:
        UsageError: `per_node` is not a number from 1 on, or a list of another length.
    """
    nodes = len(gpus)
    if per_node == "auto":
        return tuple(max(count, 1) for count in gpus)
    try:
        counts = tuple(int(piece) for piece in per_node.split(","))
    except ValueError:
        counts = ()
    if len(counts) == 1:
        counts *= nodes
    if len(counts) != nodes or any(count < 1 for count in counts):
        raise UsageError("HT213.nproc-per-node-invalid", per_node=per_node, nodes=nodes)
    return counts


def gpus_of(env: Environ) -> list[str]:
    """Return the visible GPUs of this machine, else its GPU devices, without torch."""
    visible = devices.visible(env)
    return devices.here() if visible is None else list(visible.names)


def environs(
    tasks_per_node: Sequence[int],
    env: Environ,
    launcher: str,
    gpus: Sequence[str],
    ports: Sequence[int] | None = None,
) -> dict[int, dict[str, str]]:
    """Return the environment of each rank of hosts that this machine simulates.

    Args:
        tasks_per_node: number of ranks on each host.
        env: environment to start from; variables of launchers are removed from it.
        launcher: name of the launcher whose variables the ranks get.
        gpus: GPUs of this machine.
        ports: ports of the stores for programs without a session; only of "hpctrain".

    Raises:
        UsageError: there are more ranks than one machine may have.
    """
    _check_number(sum(tasks_per_node))
    nodes = len(tasks_per_node)
    hosts = tuple(f"node{index + 1}" for index in range(nodes))
    if launcher == "slurm":  # scripts connect to the first name, so it has to lead here
        hosts = tuple(f"127.0.{index // 200}.{index % 200 + 1}" for index in range(nodes))
    elif nodes == 1:
        hosts = (os.uname().nodename,)
    worlds = [one for node in range(nodes) for one in _worlds(node, tasks_per_node, hosts)]
    start, secret = secrets.randbelow(2**31), secrets.token_hex(16)
    common = _common(env, launcher, cores.share(len(worlds), env))
    common[env_vars.SECRET] = secret
    simulated = next(kind for kind in LAUNCHERS if kind.name == launcher)
    way: dict[str, Any] = {"start": str(start), "main_address": LOOPBACK, "own_address": LOOPBACK}
    found = {}
    for world in worlds:
        own = simulated.environ(world, tasks_per_node, start)
        if launcher == "hpctrain":
            own = of_rank(world, tasks_per_node, env, **way, secret=secret, ports=ports)
        found[world.rank] = {**common, **own, **_simulated(world, tasks_per_node, gpus)}
    return found


def environs_of_host(
    world: World,
    tasks_per_node: Sequence[int],
    env: Environ,
    **way: Any,
) -> dict[int, dict[str, str]]:
    """Return the environment of each rank of this host, one of several.

    Args:
        world: this host as a rank among the hosts; `hosts` and `node_rank` are set.
        tasks_per_node: number of ranks on each host.
        env: environment to start from; variables of launchers are removed from it.
        way: way to the other ranks, as keywords of `of_rank`.

    Raises:
        UsageError: there are more ranks than one machine may have.
    """
    here = world.node_rank or 0
    _check_number(tasks_per_node[here])
    share = cores.share(tasks_per_node[here], env)
    common = _common(env, "hpctrain", share)
    return {
        rank.rank: {**common, **of_rank(rank, tasks_per_node, env, **way)}
        for rank in _worlds(here, tasks_per_node, world.hosts)
    }


def of_rank(
    world: World,
    tasks_per_node: Sequence[int],
    env: Environ,
    *,
    start: str,
    main_address: str,
    own_address: str,
    secret: str = "",
    ports: Sequence[int] | None = None,
    restarts: int = 0,
) -> dict[str, str]:
    """Return the variables of a rank: those of hpctrain, torchrun, horovodrun, and srun in its job.

    A script without hpctrain finds what it reads: that of torch.distributed, accelerate or
    Lightning the variables of torchrun, that of Horovod those of horovodrun, and one that was
    written for srun those of a task.

    Args:
        world: place of the rank; complete.
        tasks_per_node: number of ranks on each host.
        env: environment of this process, with the scheduler's job, and the network interface if a
            person has chosen it.
        start: name of this start, different from that of any other start. Attempts of one launch
            have the same text before a slash.
        main_address: address of the host with rank 0, reachable from all hosts.
        own_address: address of this host, reachable from all hosts.
        secret: secret that the ranks of this start share; may be empty.
        ports: `ports` of the `Stores` at `main_address`; None without them.
        restarts: number of earlier attempts of this start.
    """
    environ = {
        **HpctrainRun().environ(world, tasks_per_node, 0),
        env_vars.START: start,
        env_vars.MAIN_ADDRESS: main_address,
        **({env_vars.SECRET: secret} if secret else {}),
    }
    if ports is None:
        return environ
    environ |= Torchrun().environ(world, tasks_per_node, 0) | {
        "TORCHELASTIC_RUN_ID": f"hpctrain-{start.replace('/', '-')}",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": main_address,
        "MASTER_PORT": str(ports[0]),
    }
    interface = env.get(env_vars.INTERFACE) or interface_of(own_address)
    chosen = env.get(env_vars.INTERFACE) or env.get(env_vars.GLOO_INTERFACE)
    if interface and len(tasks_per_node) > 1 and not chosen:
        # A host's own name often leads to loopback, which gloo would use without it.
        environ[env_vars.GLOO_INTERFACE] = interface
    environ |= Horovodrun().environ(world, tasks_per_node, 0) | {
        # A part of the path of HTTP requests, so not the host name, which may hold any character.
        "HOROVOD_HOSTNAME": f"host-{world.node_rank}",
        "HOROVOD_GLOO_IFACE": interface or "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": main_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(ports[1]),
    }
    if env.get("SLURM_JOB_ID"):
        task = SlurmStep().environ(world, tasks_per_node, 0)
        environ |= {name: task[name] for name in _OF_A_TASK if name in task}
    return environ


def _check_number(ranks: int) -> None:
    if ranks > _MOST_RANKS:
        raise UsageError("HT213.too-many-ranks", ranks=ranks)


def print_threads(env: Environ, ranks: int) -> None:
    """Print the threads per rank, for several ranks without OMP_NUM_THREADS in `env`."""
    if ranks > 1 and "OMP_NUM_THREADS" not in env:
        count = cores.available(env)
        announce(
            f"OMP_NUM_THREADS={cores.share(ranks, env)} for each of {ranks} ranks: "
            f"{count} core{'s' if count > 1 else ''}"
        )


def _common(env: Environ, launcher: str, threads: int) -> dict[str, str]:
    """Return the environment common to all ranks: scheduler job, share of the cores."""
    environ = env_vars.scrubbed(env)
    if launcher == "hpctrain":
        environ |= env_vars.of_the_job(env)  # a simulated launcher defines its own job
        if env.get("SLURM_JOB_ID"):
            environ["SLURM_CPUS_PER_TASK"] = str(threads)
            environ.pop("SLURM_NTASKS_PER_NODE", None)
    elif launcher == "slurm":
        # srun passes them on.
        environ |= {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in env}
    # A stop file for the start is for its ranks, and so are the commit of its code and its time.
    of_the_start = (env_vars.STOP_FILE, env_vars.COMMIT, env_vars.LAUNCHED)
    environ |= {name: env[name] for name in of_the_start if name in env}
    if env.get(env_vars.LAUNCHER) == launcher:
        environ[env_vars.LAUNCHER] = launcher  # a choice of the user, as an error suggested
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    environ.setdefault("PYTHONUNBUFFERED", "1")  # Python buffers output to a pipe
    return environ


def _simulated(world: World, tasks_per_node: Sequence[int], gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables of a simulated host: its name, rank 0's address, its GPUs."""
    environ = {env_vars.MAIN_ADDRESS: LOOPBACK}
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


def _worlds(
    node_rank: int, tasks_per_node: Sequence[int], hosts: tuple[str, ...] | None
) -> list[World]:
    """Return the place of each rank of a host."""
    return [
        World(
            rank=sum(tasks_per_node[:node_rank]) + local_rank,
            world_size=sum(tasks_per_node),
            local_rank=local_rank,
            local_world_size=tasks_per_node[node_rank],
            node_rank=node_rank,
            num_nodes=len(tasks_per_node),
            hosts=hosts,
        )
        for local_rank in range(tasks_per_node[node_rank])
    ]
