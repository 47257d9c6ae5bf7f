"""Memory of this host and of the job's cgroup: what is available, the limit, kills for lack of it.

Sources: proc(5), MemAvailable; cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
"""

from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster import system

__all__ = ["available", "kills", "limit"]

_ROOT = Path("/")


class _Files(NamedTuple):
    """Names of a cgroup's files, and of the inactive cache in its statistics."""

    limit: str
    use: str
    cache: str
    events: str


_V1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")


def available(root: Path = _ROOT) -> int | None:
    """Return the memory in bytes that this process may still allocate; None if it is not known.

    Slurm and containers limit a job with a cgroup, often far below the memory of the host. Page
    cache that the kernel can free counts as available.

    Args:
        root: folder that contains proc and sys.
    """
    amounts = [
        system.meminfo("MemAvailable", root),
        *(_of_group(*group) for group in _groups(root)),
    ]
    return min((amount for amount in amounts if amount is not None), default=None)


def limit(root: Path = _ROOT) -> int | None:
    """Return the limit of the job's cgroup in bytes; None if the whole memory of the host is free.

    Args:
        root: as for `available`.
    """
    limits = (_number(_lines(folder / files.limit)) for folder, files in _groups(root))
    least = min((most for most in limits if most is not None), default=None)
    total = system.meminfo("MemTotal", root)
    return None if least is None or (total is not None and least >= total) else least


def kills(root: Path = _ROOT) -> int:
    """Return how many processes of this process's cgroup the kernel has killed for lack of memory.

    Args:
        root: as for `available`.
    """
    # Beside version 1's group for the memory, a process has a group of version 2 without it. In a
    # container, the file may be that of a parent.
    events = (_lines(folder / files.events) for folder, files in _groups(root))
    counts = (line.split() for lines in events for line in lines)
    return next((int(words[1]) for words in counts if words[0] == "oom_kill"), 0)


def _groups(root: Path) -> list[tuple[Path, _Files]]:
    """Return the folders of this process's cgroup and of its parents, the nearest first."""
    found = []
    for line in system.cgroups(root):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, files = "", _V2
        elif "memory" in controllers.split(","):
            top, files = "memory", _V1
        else:
            continue
        mount = root / "sys/fs/cgroup" / top
        group = mount / name.strip("/")
        # In a container the path may be the host's, while the mount shows only the container's.
        for folder in (group, *group.parents):
            if folder == mount or mount in folder.parents:
                found.append((folder, files))
    return found


def _of_group(folder: Path, files: _Files) -> int | None:
    most, used = _number(_lines(folder / files.limit)), _number(_lines(folder / files.use))
    if most is None or used is None:
        return None  # "max", or no such file
    fields = (line.split() for line in _lines(folder / "memory.stat"))
    unused = next((int(f[1]) for f in fields if f[0] == files.cache), 0)
    return max(most - used + unused, 0)


def _number(lines: list[str]) -> int | None:
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
