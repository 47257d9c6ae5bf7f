"""Times and sizes, as people and as Slurm write them. Pure."""

import re
import time

__all__ = [
    "gpu_count",
    "megabytes",
    "memory",
    "seconds",
    "slurm_date",
    "slurm_seconds",
    "slurm_time",
]

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WITH_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?\Z", re.ASCII)
_TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?\Z", re.ASCII)
_MEMORY = re.compile(r"(\d{1,9})\s*([KMGT]?)(?:i?B)?\Z", re.ASCII | re.IGNORECASE)
_GPUS = re.compile(r"(?:[A-Za-z0-9_.-]+:)?(\d{1,4})\Z", re.ASCII)
_LONGEST = 10 * 365 * 86400


def seconds(text: str) -> int:
    """Return the seconds of a time such as 4h, 1d12h or 90m, or in Slurm's form: 90, 4:00:00, 1-12.

    Raises:
        ValueError: the text is neither, or the time is zero or more than ten years.
    """
    text = text.strip()
    if match := _WITH_UNITS.match(text):
        numbers = zip(match.groups(), _UNITS.values(), strict=True)
        total = sum(int(number or 0) * unit for number, unit in numbers)
    else:
        total = slurm_seconds(text) or 0
    if not 0 < total <= _LONGEST:
        raise ValueError("a time such as 4h, 1d12h, 90m or 4:00:00")
    return total


def slurm_seconds(text: str) -> int | None:
    """Return the seconds of a time in Slurm's form; None for another text.

    The forms are minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes
    and days-hours:minutes:seconds. Source: --time of sbatch(1).
    """
    match = _TIME.match(text)
    if not match:
        return None
    days, *numbers = match.groups()
    parts = [int(part) for part in numbers if part is not None]
    if days is not None or len(parts) == 3:
        hours, minutes, rest = [*parts, 0, 0][:3]
        return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def slurm_date(text: str) -> int | None:
    """Return the seconds since 1970 of a local time as Slurm prints it; None for another text."""
    try:
        return int(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except (ValueError, OverflowError):
        return None


def slurm_time(text: str) -> str:
    """Return a time as Slurm's own tools print it, [D-]HH:MM:SS.

    Raises:
        ValueError: the text is no time.
    """
    rest = seconds(text)
    days, rest = divmod(rest, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def memory(text: str) -> str:
    """Return a memory size as sbatch takes it: a number and K, M, G or T. 0 means all of a node.

    Raises:
        ValueError: the text is no size, or has no unit, which Slurm would read as megabytes.
    """
    match = _MEMORY.match(text.strip())
    if not match or (int(match[1]) and not match[2]):
        raise ValueError("a size with its unit such as 64G, or 0 for all that a node has")
    return match[1] + (match[2].upper() if int(match[1]) else "")


def megabytes(size: str) -> float:
    """Return the megabytes of a size that `memory` has returned; 0 for no size."""
    factors = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return int(size[:-1]) * factors[size[-1]] if size[-1:] in factors else 0


def gpu_count(text: str) -> int:
    """Return the number in a value of --gpus-per-node: N or TYPE:N.

    Raises:
        ValueError: the value has no number.
    """
    if not (match := _GPUS.match(text)):
        raise ValueError("a number, or a type and a number such as a100:4")
    return int(match[1])
