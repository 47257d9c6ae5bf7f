"""Shared functions of the benchmarks: statistics, sizes, tables, machine facts. No torch."""

import datetime
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from importlib import metadata
from pathlib import Path
from typing import Any

from hpctrain.cluster import commands

__all__ = [
    "busbw",
    "compare",
    "describe",
    "facts",
    "order",
    "size",
    "spell",
    "summary",
    "table",
]

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kKMGT]?)B?\Z", re.ASCII)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles, and a 95 % confidence interval of the median.

    Other jobs on the machine would distort a mean. The interval is that of the sign test, which
    assumes no distribution. With fewer than six values it is their range, at a lower confidence.
    """
    ordered = sorted(values)
    count = len(ordered)
    quarters = statistics.quantiles(ordered, n=4, method="inclusive")
    below = _left_out(count)
    return {
        "median": statistics.median(ordered),
        "first_quartile": quarters[0],
        "third_quartile": quarters[2],
        "low": ordered[below],
        "high": ordered[count - 1 - below],
        "count": count,
    }


def _left_out(count: int) -> int:
    """Return how many values the interval leaves out at each end.

    Of n values, k or fewer are below the true median in sum(comb(n, i) for i <= k) of 2^n cases,
    and above it in as many cases. Both together may be at most a twentieth of all cases.
    """
    number, ways, cases = 0, 1, 1
    while 40 * cases <= 2**count:
        number += 1
        ways = ways * (count - number + 1) // number
        cases += ways
    return max(number - 1, 0)


def compare(
    times: Mapping[str, Sequence[float]], base: str, unit: str, factor: float = 1.0
) -> dict[str, dict[str, dict[str, float]]]:
    """Summarise the times of each arm, and their ratios to the base arm's times in the same round.

    Args:
        times: times of each arm, one for each round.
        base: arm that the others are compared with.
        unit: name of the times in the result.
        factor: factor that converts the times to that unit.
    """
    return {
        name: {
            unit: summary([time * factor for time in own]),
            "ratio": summary([a / b for a, b in zip(own, times[base], strict=True)]),
        }
        for name, own in times.items()
    }


def order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the arms in a round.

    Over the rounds, each arm runs as often before another arm as after it. So drift of the machine
    within a round affects all arms equally.
    """
    start = number // 2 % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if number % 2 else rotated


def busbw(bytes_per_second: float, ranks: int) -> float:
    """Compute the bus bandwidth of an all-reduce.

    It is the load of the slowest link, and can be compared across numbers of ranks.

    Args:
        bytes_per_second: algorithm bandwidth, which is size divided by time.
        ranks: number of ranks that take part.

    Source: PERFORMANCE.md of NVIDIA's nccl-tests: factor 2(n-1)/n.
    """
    return bytes_per_second * 2 * (ranks - 1) / ranks


def size(text: str) -> int:
    """Return the bytes of a size such as 4B, 64kB, 1.5MB or 1GB; units are powers of ten.

    Raises:
        ValueError: the text is no size, or not a whole number of bytes from one on.
    """
    match = _SIZE.match(text.strip())
    value = Decimal(match[1]) * _UNITS[match[2].replace("K", "k")] if match else Decimal(0)
    if value < 1 or value != int(value):
        raise ValueError("a size such as 4B, 64kB, 1MB or 1GB")
    return int(value)


def spell(count: float) -> str:
    """Format a number of bytes for people; `size` reads a round number back unchanged."""
    for unit, factor in reversed(_UNITS.items()):
        if count >= 0.9995 * factor:  # 999.7 kB is 1 MB when rounded to three digits
            return f"{count / factor:.3g} {unit}B"
    return f"{count:.3g} B"


def describe(figures: Mapping[str, float], form: str = ".1f") -> str:
    """Format a median with its interval."""
    return f"{figures['median']:{form}} [{figures['low']:{form}}, {figures['high']:{form}}]"


def facts(packages: Sequence[str]) -> dict[str, Any]:
    """Return the facts that a figure depends on: date, command, machine, versions and commit.

    Args:
        packages: names of the packages whose versions matter.
    """
    program = Path(sys.argv[0])
    ours = program.name == "hpctrain" or program.parts[-2:] == ("hpctrain", "__main__.py")
    command = ["hpctrain", *sys.argv[1:]] if ours else [Path(sys.executable).name, *sys.argv]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "load": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
        },
        "commit": _commit(),
    }


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows under a header; the first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this file, with a + if its repository has changes.

    None if no repository tracks the file, as in an installed package, even if another repository
    contains the package.
    """
    file = Path(__file__)
    if commands.git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    describe = ("--no-optional-locks", "describe", "--always", "--dirty=+", "--abbrev=12")
    return commands.git(file.parent, *describe)
