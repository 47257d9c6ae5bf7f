"""Checks of system limits for this process: files, memory, cores and shared memory; the clock."""

import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding

__all__ = [
    "examine",
    "judge_clock",
    "judge_cores",
    "judge_locked_memory",
    "judge_open_files",
    "judge_processes",
    "judge_shared_memory",
]

_SHARED = "/dev/shm"  # noqa: S108 — this path is only read
_INFINIBAND = Path("/sys/class/infiniband")
_MIB, _GIB = 2**20, 2**30
# Other sockets of rank 0 and of rings, and open files of Python, torch and a data set.
_OTHER_FILES = 64
_FEW_PROCESSES = 1024
# Least memory that InfiniBand verbs register; NCCL's documentation recommends no limit.
_LITTLE_LOCKED = 64 * _MIB
_DOCKER_SHARED = 64 * _MIB
# From linux/timex.h: a return value of adjtimex(2), and a bit of its status.
_TIME_ERROR, _UNSYNCHRONISED = 5, 0x40
_STATUS_OFFSET, _TIMEX_BYTES = 40, 256

Limit = int | None  # None: no limit


def examine(env: Mapping[str, str], world_size: int, of_host: bool) -> list[Finding]:
    """Check the limits of this process.

    Args:
        env: environment variables.
        world_size: number of ranks that may connect to this one.
        of_host: whether to also check what all processes of the host share.
    """
    found = [
        judge_open_files(*_limit(resource.RLIMIT_NOFILE), world_size),
        judge_locked_memory(_limit(resource.RLIMIT_MEMLOCK)[0], _has_infiniband()),
        judge_processes(*_limit(resource.RLIMIT_NPROC)),
        judge_cores(len(os.sched_getaffinity(0)), os.cpu_count() or 1, env, world_size == 1),
    ]
    if of_host:
        found += [judge_shared_memory(*_shared_memory()), *judge_clock(_clock())]
    return found


def _limit(kind: int) -> tuple[Limit, Limit]:
    soft, hard = resource.getrlimit(kind)
    none = resource.RLIM_INFINITY
    return None if soft == none else soft, None if hard == none else hard


def _text(limit: Limit) -> str:
    return "unlimited" if limit is None else str(limit)


def judge_open_files(soft: Limit, hard: Limit, world_size: int) -> Finding:
    """Return a finding on whether this process may open a connection to every rank."""
    need = world_size + _OTHER_FILES
    found = f"{_text(soft)} (ulimit -n; hard limit {_text(hard)})"
    if soft is None or soft >= need:
        return Finding("open files", OK, found)
    if hard is None or hard >= need:
        return Finding("open files", OK, f"{found}; the Session raises the soft limit")
    fixes = (
        f"ask for a hard limit of {need} or more: LimitNOFILE of slurmd",
        f"docker run --ulimit nofile={need} …",
    )
    found = f"{found}, but {world_size} ranks need about {need}"
    return Finding("open files", PROBLEM, found, fixes)


def judge_locked_memory(soft: Limit, infiniband: bool) -> Finding:
    """Return a finding on whether InfiniBand may lock enough memory.

    Args:
        soft: soft limit in bytes; None for no limit.
        infiniband: whether the host has InfiniBand devices.
    """
    found = "unlimited" if soft is None else f"{soft // 1024} KiB"
    if not infiniband:
        return Finding("locked memory", OK, f"{found} (ulimit -l); no InfiniBand here")
    if soft is None or soft >= _LITTLE_LOCKED:
        return Finding("locked memory", OK, f"{found} (ulimit -l)")
    return Finding(
        "locked memory",
        WARNING,
        f"{found} (ulimit -l), but InfiniBand needs more",
        (
            "ulimit -l unlimited",
            "if that is refused: LimitMEMLOCK=infinity of slurmd",
            "docker run --ulimit memlock=-1 …",
        ),
    )


def _has_infiniband() -> bool:
    try:
        return any(_INFINIBAND.iterdir())
    except OSError:
        return False


def judge_processes(soft: Limit, hard: Limit) -> Finding:
    """Return a finding on whether this user may start enough processes and threads."""
    found = f"{_text(soft)} (ulimit -u; hard limit {_text(hard)})"
    if soft is None or soft >= _FEW_PROCESSES:
        return Finding("processes", OK, found)
    more = hard is None or hard >= _FEW_PROCESSES
    fix = f"ulimit -u {_text(hard)}" if more else "ask for a higher limit: LimitNPROC of slurmd"
    found += "; threads and loader workers count as processes"
    return Finding("processes", WARNING, found, (fix,))


def judge_cores(cores: int, on_host: int, env: Mapping[str, str], alone: bool) -> Finding:
    """Return a finding on whether the requested threads fit the cores of this process.

    Args:
        cores: number of cores that the process may run on.
        on_host: number of cores of the host.
        env: environment variables, for OMP_NUM_THREADS and MKL_NUM_THREADS.
        alone: whether no other rank shares the cores.
    """
    found = f"{cores} of {on_host} may be used"
    requested = {
        name: env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if env.get(name)
    }
    for name, value in requested.items():
        # OpenMP also accepts a list with a number for each nesting level.
        first = value.partition(",")[0].strip()
        found += f", {name}={value[:40]}"
        if not (first.isascii() and first.isdecimal() and 1 <= len(first) < 8 and int(first)):
            return Finding("cores", WARNING, f"{found}, no number", (f"export {name}={cores}",))
        if int(first) > cores:
            fixes = (f"export {name}={cores}", f"under Slurm: srun --cpus-per-task={int(first)}")
            return Finding("cores", WARNING, f"{found}: more threads than cores", fixes)
    if cores == 1 < on_host:
        return Finding(
            "cores",
            WARNING,
            f"{found}: loader workers share the core with the training",
            ("srun --cpus-per-task=N", "mpirun --bind-to none"),
        )
    threads = min((int(value.partition(",")[0]) for value in requested.values()), default=None)
    if threads is not None and alone:
        found += f": {cores - threads} left for loader workers"
    return Finding("cores", OK, found)


def _shared_memory() -> tuple[int, int] | tuple[None, None]:
    try:
        facts = os.statvfs(_SHARED)
    except OSError:
        return None, None
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def judge_shared_memory(size: int | None, free: int | None) -> Finding:
    """Return a finding on whether /dev/shm has room for the batches of loader workers.

    Args:
        size, free: size and free space of /dev/shm in bytes; None where it does not exist.
    """
    docker = ("docker run --shm-size=8g …", "docker run --ipc=host …")
    if size is None or free is None:
        return Finding(_SHARED, WARNING, "missing: loader workers need it", docker)
    found = f"{free / _GIB:.1f} of {size / _GIB:.1f} GiB free"
    if size <= _DOCKER_SHARED:
        found = f"{size / _MIB:.0f} MiB: too small for loader workers"
        return Finding(_SHARED, WARNING, found, docker)
    if free < _DOCKER_SHARED:
        fix = (
            f"ls -l {_SHARED}, and remove the files of processes that have ended (torch_*, nccl-*)"
        )
        return Finding(_SHARED, WARNING, f"nearly full: {found}", (fix,))
    return Finding(_SHARED, OK, found)


def _clock() -> tuple[int, int] | None:
    """Return state and status of the kernel's clock from adjtimex(2); None where the call fails.

    The call changes nothing and needs no permission, but a container may forbid it.
    """
    try:
        library = ctypes.CDLL(None)
        buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
        state = library.adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return state, ctypes.c_int.from_buffer(buffer, _STATUS_OFFSET).value


def judge_clock(answer: tuple[int, int] | None) -> list[Finding]:
    """Return a finding on whether a time server keeps the clock synchronised.

    Args:
        answer: state and status of adjtimex(2); None where the call failed: then no finding.
    """
    if answer is None:
        return []
    state, status = answer
    if state == _TIME_ERROR or status & _UNSYNCHRONISED:
        fixes = ("as root: timedatectl set-ntp true", "look at chronyc tracking")
        return [Finding("clock", WARNING, "not synchronised, according to the kernel", fixes)]
    return [Finding("clock", OK, "synchronised")]
