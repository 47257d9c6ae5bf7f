"""What the benchmarks share: spread, pairs, verdicts, and what machine it was. No torch."""

import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe", "facts", "order", "save", "summary", "table", "verdict"]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, and an interval that holds the true median in 95 of 100 cases.

    A mean would be that of the other jobs on the machine; the interval is that of the sign test
    and assumes no shape.
    """
    rising = sorted(values)
    count = len(rising)
    quarters = statistics.quantiles(rising, n=4, method="inclusive")
    below = max(math.floor((count - 1.96 * math.sqrt(count)) / 2), 0)
    return {
        "median": statistics.median(rising),
        "first_quartile": quarters[0],
        "third_quartile": quarters[2],
        "low": rising[below],
        "high": rising[count - 1 - below],
        "count": count,
    }


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of the arms in a round: each comes as often before another as after it.

    Drift of the machine within a round then falls on all arms alike.
    """
    start = number // 2 % len(names)
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if number % 2 else turned


def verdict(figures: dict[str, float], limit: float) -> str:
    """Whether the median keeps to a limit, and whether the spread lets one say so."""
    said = "met" if figures["median"] <= limit else "missed"
    sure = figures["high"] <= limit or figures["low"] > limit
    return said if sure else f"{said}, within the noise"


def describe(figures: dict[str, float], form: str = ".1f") -> str:
    """A median with its interval."""
    return f"{figures['median']:{form}} [{figures['low']:{form}}, {figures['high']:{form}}]"


def facts(packages: Sequence[str]) -> dict[str, Any]:
    """What a figure means nothing without."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
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


def save(path: str | None, record: dict[str, Any]) -> None:
    """Write a record as JSON, where a file was named."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
        print(f"saved to {path}")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under a head, the first column to the left and the others to the right."""
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
    """The commit of this file's folder, with a + where something in it has changed."""
    try:
        answer = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
