"""Shared functions of the benchmarks: statistics, sizes, tables, results, machine facts. No torch.

Results are arms by name, or groups of arms. An arm is a dict of figures, each with a median and an
interval, and of numbers without a spread. Other keys than those of `HEADS` are not shown.
"""

import datetime
import math
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.cluster import system

__all__ = [
    "HEADS",
    "Results",
    "arms",
    "compare",
    "describe",
    "facts",
    "order",
    "rows",
    "size",
    "spell",
    "summary",
    "table",
    "take_turns",
]

T = TypeVar("T")
Results = dict[str, Any]
# Figures of an arm by name, each with one value for each round.
Series = Mapping[str, Sequence[float]]

# Column heads by figure; their order is that of the columns.
HEADS = {
    "ms": "ms",
    "us": "µs",
    "s": "s",
    "most_s": "most s",
    "restart_s": "s of a restart",
    "stall_s": "s that training waits",
    "images_per_s": "images/s",
    "tokens_per_s": "tokens/s",
    "ratio": "× base",
    "whole_s": "s until on the disk",
    "tflops": "TFLOP/s",
    "busbw": "busbw GB/s",
    "images_per_s_of_a_rank": "of the slowest rank",
    "peak_memory": "peak memory",
    "more_ms": "ms more",
    "more_us": "µs more",
    "more_cpu_ms": "ms more of CPU time",
    "check_share": "share of the check",
    "more_cpu_us": "µs more of CPU time",
    "ratio_by_cpu": "× base, by CPU time",
    "more_s": "s more",
    "cpu_s": "s of CPU time",
    "check_s": "of it, s for the check",
    "unpack_s": "s to unpack the roster",
    "roll_bytes": "bytes of the roster",
    "freezing_ms": "ms to record the code",
    "samples": "samples counted",
    "top5": "top-5",
    "first_s": "first save, s",
    "first_bytes": "memory of it, bytes",
    "held_bytes": "bytes of a rank",
    "share": "of ddp's",
    "slowdown": "times as long",
    "calls": "calls to the file system",
    "calls_ratio": "× base, calls",
    "beside_mb": "MB beside the ranks",
    "private_mb": "private memory, MB",
    "private_mb_ratio": "× base, memory",
}
_RATIOS = ("ratio", "ratio_by_cpu", "slowdown", "share", "calls_ratio", "private_mb_ratio")

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kKMGT]?)B?\Z", re.ASCII)


def order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the arms in a round.

    Over the rounds, each arm runs as often before another arm as after it. So drift of the machine
    within a round affects all arms equally.
    """
    start = number // 2 % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if number % 2 else rotated


def take_turns(
    arms: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0
) -> dict[str, list[T]]:
    """Call the arms in turn, and return the results of each arm, one for each round.

    Args:
        arms: arms by name.
        rounds: number of rounds.
        warm_up: number of rounds before them, whose results are left out.
    """
    results: dict[str, list[T]] = {name: [] for name in arms}
    for number in range(warm_up + rounds):
        for name in order(list(arms), number):
            results[name].append(arms[name]())
    return {name: own[warm_up:] for name, own in results.items()}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median and its 95 % confidence interval.

    Other jobs on the machine would distort a mean. The interval is between two of the values (sign
    test, normal approximation), so it assumes no distribution. Of few values it is their range.
    """
    ordered, count = sorted(values), len(values)
    left_out = max(int((count - 1 - 1.96 * math.sqrt(count)) / 2), 0)
    return {
        "median": statistics.median(ordered),
        "low": ordered[left_out],
        "high": ordered[count - 1 - left_out],
        "count": count,
    }


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


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows under a header; the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def compare(
    series: Mapping[str, Series], base: str = "", by: Sequence[str] = ("ratio",)
) -> dict[str, Results]:
    """Summarise the figures of each arm, and compare them round by round with those of the base.

    Args:
        series: figures of each arm.
        base: arm that the others are compared with.
        by: `ratio`, of the first figure, and `more_FIGURE`, the difference of a figure.
    """
    results: dict[str, Results] = {}
    for name, own in series.items():
        arm: Results = {key: summary(values) for key, values in own.items()}
        for key in by:
            figure = next(iter(own)) if key == "ratio" else key.removeprefix("more_")
            pairs = zip(own[figure], series[base][figure], strict=True)
            arm[key] = summary([a / b if key == "ratio" else a - b for a, b in pairs])
        results[name] = arm
    return results


def arms(results: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Results]]:
    """Yield the arms of all groups, with the names of their groups before their own."""
    for name, value in results.items():
        if HEADS.keys() & value.keys():
            yield ", ".join((*path, name)), value
        else:
            yield from arms(value, (*path, name))


def rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a head and a row for each arm, without columns that are empty."""
    cells = [
        (name, {HEADS[key]: _cell(key, arm[key]) for key in HEADS if key in arm})
        for name, arm in arms(results)
    ]
    heads = [head for head in dict.fromkeys(HEADS.values()) if any(head in row for _, row in cells)]
    return [
        ("median [95 % interval]", *heads),
        *((name, *(row.get(head, "") for head in heads)) for name, row in cells),
    ]


def _cell(key: str, value: Any) -> str:
    if key == "peak_memory":
        return spell(value)
    if not isinstance(value, Mapping):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    ratio = key in _RATIOS
    if value["low"] == value["high"] == float(ratio):
        return "base" if ratio else ""
    size = abs(value["median"]) or 1
    digits = 3 if ratio else min(max(2 - math.floor(math.log10(size)), 0), 4)
    return describe(value, f",.{digits}f")


def facts(packages: Sequence[str]) -> dict[str, Any]:
    """Return the facts that a figure depends on: date, command, machine and versions.

    Args:
        packages: names of the packages whose versions matter.
    """
    program = Path(sys.argv[0])
    ours = program.name == "hpctrain" or program.parts[-2:] == ("hpctrain", "__main__.py")
    command = ["hpctrain", *sys.argv[1:]] if ours else [Path(sys.executable).name, *sys.argv]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # As a person types it here, whatever has started the program.
        "command": shlex.join(word.removeprefix(f"{os.getcwd()}/") for word in command),
        "machine": {
            "cpu": _cpu(),
            "cores": len(system.cores()),
            "system": platform.platform(),
            "load": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
        },
    }


def _cpu() -> str:
    return system.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
