"""Checks of system limits for this process: open files, locked memory, cores, shared memory."""

import os
import resource
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.process import file_limit
from hpctrain.tools.doctor.findings import OK, WARNING, Finding

__all__ = ["examine", "judge_cores", "judge_locked_memory", "judge_shared_memory", "open_files"]

_SHARED = "/dev/shm"  # noqa: S108 — this path is only read
_INFINIBAND = Path("/sys/class/infiniband")
_MIB, _GIB = 2**20, 2**30
# Least memory that InfiniBand verbs register; NCCL's documentation recommends no limit.
_LITTLE_LOCKED = 64 * _MIB
_DOCKER_SHARED = 64 * _MIB


def examine(env: Mapping[str, str], world: World, undo: ExitStack) -> list[Finding]:
    """Check the limits of this process; only the first rank of a host checks what its ranks share.

    Args:
        env: environment variables.
        world: place of this rank.
        undo: stack that receives the callback which restores the limit on open files.
    """
    cores, on_host = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = [
        open_files(world.world_size, undo),
        judge_locked_memory(soft, os.path.isdir(_INFINIBAND) and any(_INFINIBAND.iterdir())),
        judge_cores(cores, on_host, world.local_world_size or 1, env),
    ]
    return [*found, judge_shared_memory(*_shared_memory())] if world.local_rank == 0 else found


def open_files(world_size: int, undo: ExitStack) -> Finding:
    """Raise the limit on open files as the Session does; return a finding on whether that works."""
    try:
        undo.callback(file_limit.make_room(world_size))
    except UsageError as error:
        return Finding.of("open files", error)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding("open files", OK, f"{soft} (hard limit {hard})")


def judge_locked_memory(soft: int, infiniband: bool) -> Finding:
    """Return a finding on whether InfiniBand may lock enough memory.

    Args:
        soft: soft limit in bytes.
        infiniband: whether the host has InfiniBand devices.
    """
    unlimited = soft == resource.RLIM_INFINITY
    found = f"{'unlimited' if unlimited else f'{soft // 1024} KiB'} (ulimit -l)"
    if not infiniband:
        return Finding("locked memory", OK, f"{found}; no InfiniBand here")
    if unlimited or soft >= _LITTLE_LOCKED:
        return Finding("locked memory", OK, found)
    fixes = (
        "ulimit -l unlimited",
        "if that is refused: LimitMEMLOCK=infinity of slurmd",
        "docker run --ulimit memlock=-1 …",
    )
    return Finding("locked memory", WARNING, found, "no limit, for InfiniBand", fixes)


def judge_cores(cores: int, on_host: int, ranks: int, env: Mapping[str, str]) -> Finding:
    """Return a finding on whether the requested threads fit the cores.

    Args:
        cores: number of cores that the process may run on.
        on_host: number of cores of the host.
        ranks: number of ranks on this host.
        env: environment variables, for OMP_NUM_THREADS and MKL_NUM_THREADS.
    """
    found = f"{cores} of {on_host} may be used"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # OpenMP also accepts a list with a number for each nesting level.
        first = env.get(name, "").partition(",")[0].strip()[:9]
        if not (first.isascii() and first.isdecimal()):
            continue
        found += f", {name}={first}"
        most = min(cores, max(on_host // ranks, 1))
        if int(first) > most:
            of_ranks = f", {ranks} ranks on this host" if ranks > 1 else ""
            return Finding(
                "cores",
                WARNING,
                f"{found}{of_ranks}",
                f"at most {most} threads, so that each has a core",
                (f"export {name}={most}", f"under Slurm: srun --cpus-per-task={first}"),
            )
    if cores == 1 < on_host:
        fixes = ("srun --cpus-per-task=N", "mpirun --bind-to none")
        return Finding("cores", WARNING, found, "cores for loader workers as well", fixes)
    return Finding("cores", OK, found)


def _shared_memory() -> tuple[int, int]:
    try:
        facts = os.statvfs(_SHARED)
    except OSError:
        return 0, 0
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def judge_shared_memory(size: int, free: int) -> Finding:
    """Return a finding on whether /dev/shm has room for the batches of loader workers.

    Args:
        size, free: size and free space of /dev/shm in bytes; 0 where it does not exist.
    """
    found = f"{free / _GIB:.1f} of {size / _GIB:.1f} GiB free"
    if free >= _DOCKER_SHARED and size > _DOCKER_SHARED:
        return Finding(_SHARED, OK, found)
    fixes = (
        f"rm {_SHARED}/torch_* {_SHARED}/nccl-*, where their processes have ended",
        "docker run --shm-size=8g …",
        "docker run --ipc=host …",
    )
    return Finding(_SHARED, WARNING, found, "some GiB, for the batches of loader workers", fixes)
