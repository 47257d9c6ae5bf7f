"""Times and memory as sbatch(1) writes them, for options --time, --mem and --signal."""

import re
import signal

from hpctrain.jobs.units import slurm_seconds

__all__ = ["megabytes", "seconds", "signal_request"]

_MEMORY = re.compile(r"(\d{1,12})([KMGT]?)B?\Z", re.ASCII | re.IGNORECASE)
_SIGNAL = re.compile(r"(?:([RB]+):)?(\w+)(?:@(\d{1,9}))?\Z", re.ASCII)


def seconds(text: str) -> float | None:
    """A limit of time; None where it is none, infinity where there is no limit."""
    if text.lower() in ("infinite", "unlimited", "-1", "0"):
        return float("inf")
    return slurm_seconds(text)


def megabytes(text: str) -> tuple[int, bool] | None:
    """The number of an amount of memory and whether it has a unit; None where it is none."""
    match = _MEMORY.match(text)
    return (int(match[1]), bool(match[2])) if match else None


def signal_request(text: str) -> tuple[bool, str, int] | None:
    """What --signal=[{R|B}:]SIGNAL[@SECONDS] asks for; None where sbatch would refuse it.

    Returns:
        Whether the batch shell alone gets it, its name without SIG, and the seconds (60 by
        default) before the end of the time.
    """
    match = _SIGNAL.match(text)
    if not match:
        return None
    flags, name, lead = match[1] or "", match[2].upper().removeprefix("SIG"), int(match[3] or 60)
    if name.isdigit():
        try:
            name = signal.Signals(int(name)).name.removeprefix("SIG")
        except ValueError:
            return None
    if not hasattr(signal, f"SIG{name}") or lead > 65535:
        return None
    return "B" in flags, name, lead
