"""Memory that this process may still allocate, limited by the host and the job's cgroup."""

from pathlib import Path

__all__ = ["available"]


def available(root: Path = Path("/")) -> int | None:
    """Return the available memory in bytes; None if the system does not report it.

    Slurm and containers limit a job with a cgroup, often far below the memory of the host. Page
    cache that the kernel can free counts as available.

    Args:
        root: folder that contains /proc and /sys.

    Source: proc(5), MemAvailable; cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
    """
    amounts = [_of_machine(root), *(_of_group(*files) for files in _groups(root))]
    return min((amount for amount in amounts if amount is not None), default=None)


def _of_machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _groups(root: Path) -> list[tuple[Path, Path, Path, str]]:
    """Return limit, use, statistics and inactive cache's name, for this cgroup and its parents."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, limit, use, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, use = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        mount = root / "sys/fs/cgroup" / top
        group = mount / name.strip("/")
        # In a container the path may be the host's, while the mount shows only the container's.
        for folder in (group, *group.parents):
            if folder == mount or mount in folder.parents:
                found.append((folder / limit, folder / use, folder / "memory.stat", cache))
    return found


def _of_group(limit: Path, use: Path, statistics: Path, cache: str) -> int | None:
    most, used = _number(_lines(limit)), _number(_lines(use))
    if most is None or used is None:
        return None  # "max", or no such file
    fields = (line.split() for line in _lines(statistics))
    unused = next((int(f[1]) for f in fields if f[0] == cache), 0)
    return max(most - used + unused, 0)


def _number(lines: list[str]) -> int | None:
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
