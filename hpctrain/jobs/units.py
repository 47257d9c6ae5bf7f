"""Times and sizes, as people and as Slurm write them. Pure."""

import re

__all__ = ["gpu_count", "memory", "seconds", "slurm_time"]

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_SPOKEN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?\Z", re.ASCII)
# Source: --time of sbatch(1).
_SLURM = (
    re.compile(r"(?P<m>\d+)(?::(?P<s>\d{1,2}))?\Z", re.ASCII),
    re.compile(r"(?P<h>\d+):(?P<m>\d{1,2}):(?P<s>\d{1,2})\Z", re.ASCII),
    re.compile(r"(?P<d>\d+)-(?P<h>\d{1,2})(?::(?P<m>\d{1,2})(?::(?P<s>\d{1,2}))?)?\Z", re.ASCII),
)
_MEMORY = re.compile(r"(\d{1,9})\s*([KMGT]?)(?:i?B)?\Z", re.ASCII | re.IGNORECASE)
_GPUS = re.compile(r"(?:[A-Za-z0-9_.-]+:)?(\d{1,4})\Z", re.ASCII)
_LONGEST = 10 * 365 * 86400


def seconds(text: str) -> int:
    """The seconds of a time such as 4h, 1d12h or 90m, or as Slurm writes it: 90, 4:00:00, 1-12.

    Raises:
        ValueError: it is neither, or nothing, or more than ten years.
    """
    text = text.strip()
    if spoken := _SPOKEN.match(text):
        parts = dict(zip(_UNITS, spoken.groups(), strict=True))
    else:
        matches = (pattern.match(text) for pattern in _SLURM)
        parts = next((match.groupdict() for match in matches if match), {})
    total = sum(int(number or 0) * _UNITS[unit] for unit, number in parts.items())
    if not 0 < total <= _LONGEST:
        raise ValueError("a time such as 4h, 1d12h, 90m or 4:00:00")
    return total


def slurm_time(text: str) -> str:
    """A time as Slurm's own tools print it, [D-]HH:MM:SS.

    Raises:
        ValueError: it is no time.
    """
    left = seconds(text)
    days, left = divmod(left, 86400)
    clock = f"{left // 3600:02}:{left // 60 % 60:02}:{left % 60:02}"
    return f"{days}-{clock}" if days else clock


def memory(text: str) -> str:
    """A size of memory as sbatch takes it: a number and K, M, G or T. 0 is all that a node has.

    Raises:
        ValueError: it is none; also without a unit, which Slurm takes for megabytes.
    """
    match = _MEMORY.match(text.strip())
    if not match or (int(match[1]) and not match[2]):
        raise ValueError("a size with its unit such as 64G, or 0 for all that a node has")
    return match[1] + (match[2].upper() if int(match[1]) else "")


def gpu_count(text: str) -> int:
    """The number in what --gpus-per-node takes: N or TYPE:N.

    Raises:
        ValueError: it has none.
    """
    if not (match := _GPUS.match(text)):
        raise ValueError("a number, or a type and a number such as a100:4")
    return int(match[1])
