"""Cores of this host, and their division among its ranks."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster import system
from hpctrain.cluster.env_vars import number

__all__ = ["available", "divided", "share", "widen"]

_SYSTEM = Path("/sys/devices/system")


def available(env: Mapping[str, str]) -> int:
    """Return the number of cores that the ranks of this host may use.

    It is the affinity of this process, or the number of the job's CPUs on this host if that is
    less: a Slurm without cgroups leaves all cores of the host in the affinity.
    """
    cores = len(system.cores())
    return min(cores, number(env, "SLURM_CPUS_ON_NODE") or cores)


def share(ranks: int, env: Mapping[str, str]) -> int:
    """Return the cores per rank: several ranks that each use all cores are slower than one."""
    return max(1, available(env) // ranks)


def widen(env: Mapping[str, str]) -> None:
    """Let this process use all of the job's CPUs on this host.

    Slurm may bind the only task of a host to fewer, as it does not know that ranks will start in
    it. The kernel keeps the limits of a cgroup.
    """
    if len(system.cores()) < (number(env, "SLURM_CPUS_ON_NODE") or 0):
        system.bind(range(os.cpu_count() or 1))


def divided(ranks: int, env: Mapping[str, str]) -> list[set[int]] | None:
    """Return the cores of each rank of this host; None if the ranks are not to be bound.

    Ranks get neighbouring cores: whole cores where there are hardware threads, and cores of one
    NUMA node where possible. Scheduler and system number GPUs and NUMA nodes in the same order, so
    a rank is usually near its GPU.

    Args:
        ranks: number of ranks on this host.
        env: environment of this process.
    """
    cores = system.cores()
    # Other jobs may run on cores of the affinity that do not belong to this one.
    if not system.BINDS or ranks < 2 or len(cores) < ranks or available(env) < len(cores):
        return None
    ordered = sorted(cores, key=_place)
    ends = [len(ordered) * (index + 1) // ranks for index in range(ranks)]
    return [set(ordered[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _place(core: int) -> tuple[int, Sequence[int], int]:
    """Return the NUMA node of a core, the hardware threads of its physical core, and itself."""
    folder = _SYSTEM / "cpu" / f"cpu{core}"
    nodes = [int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")]
    try:
        siblings = _cores((folder / "topology" / "thread_siblings_list").read_text())
    except (OSError, ValueError):
        siblings = [core]
    return min(nodes, default=0), siblings, core


def _cores(text: str) -> list[int]:
    """Expand the kernel's list of cores: `0-2,8` becomes 0, 1, 2, 8."""
    found: list[int] = []
    for piece in text.strip().split(","):
        first, _, last = piece.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
