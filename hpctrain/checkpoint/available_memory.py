"""How much memory this process may still take: of the machine, and of its job's cgroup."""

from pathlib import Path

__all__ = ["available"]


def available(root: Path = Path("/")) -> int | None:
    """Bytes; None where the system does not say.

    Slurm and containers limit a job by a cgroup, often far below what the machine has. Memory of
    the page cache that the kernel would give back counts as available.

    Args:
        root: below which /proc and /sys lie.

    Source: proc(5), MemAvailable; cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
    """
    rooms = [_of_machine(root), *(_of_group(*files) for files in _groups(root))]
    return min((room for room in rooms if room is not None), default=None)


def _of_machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _groups(root: Path) -> list[tuple[Path, Path, Path, str]]:
    """Limit, use, statistics and the name of the inactive cache there, of all groups around."""
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
        # In a container the path may be that of the host, while the mount shows only its own.
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
