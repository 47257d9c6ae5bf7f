"""Parsers of the options --time, --mem and --signal, in the notation of sbatch(1)."""

import re
import signal

from hpctrain.jobs.units import slurm_seconds

__all__ = ["megabytes", "seconds", "signal_request"]

_MEMORY = re.compile(r"(\d{1,12})([KMGT]?)B?\Z", re.ASCII | re.IGNORECASE)
_SIGNAL = re.compile(r"(?:([RB]+):)?(\w+)(?:@(\d{1,9}))?\Z", re.ASCII)


def seconds(text: str) -> float | None:
    """Return a time limit in seconds; infinity if there is no limit, None if it is invalid."""
    if text.lower() in ("infinite", "unlimited", "-1", "0"):
        return float("inf")
    return slurm_seconds(text)


def megabytes(text: str) -> tuple[int, bool] | None:
    """Return the number in an amount of memory, and whether it has a unit; None if invalid."""
    match = _MEMORY.match(text)
    return (int(match[1]), bool(match[2])) if match else None


def signal_request(text: str) -> tuple[bool, str, int] | None:
    """Parse --signal=[{R|B}:]SIGNAL[@SECONDS]; return None if sbatch would refuse it.

    Returns:
        Whether only the batch shell gets the signal, its name without SIG, and the seconds (60 by
        default) before the end of the time limit.
    """
    match = _SIGNAL.match(text)
    if not match:
        return None
    flags, name, seconds = match[1] or "", match[2].upper().removeprefix("SIG"), int(match[3] or 60)
    if name.isdigit():
        try:
            name = signal.Signals(int(name)).name.removeprefix("SIG")
        except ValueError:
            return None
    if not hasattr(signal, f"SIG{name}") or seconds > 65535:
        return None
    return "B" in flags, name, seconds
