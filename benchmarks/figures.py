"""Rows and outcomes of a record of a benchmark; no torch.

`results` of a record holds arms by name, or groups of arms. An arm holds figures with a median and
an interval, numbers without a spread, and `targets`: by figure, a limit and the outcome.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.tools.bench.measure import describe

__all__ = ["HEADS", "outcomes", "rows"]

Record = Mapping[str, Any]

# Column heads by figure of a benchmark; figures that are not listed are not shown.
HEADS = {
    "ms": "ms",
    "us": "µs",
    "s": "s",
    "wall_s": "s",
    "stall_s": "s that training waits",
    "images_per_s": "images/s",
    "ratio": "× base",
    "times_base": "× base",
    "more_ms": "ms more",
    "more_us": "µs more",
    "more_cpu_us": "µs more of CPU time",
    "more_s": "s more",
    "cpu_s": "s of rank 0's CPU time",
    "check_s": "of it, s for the check",
    "proof_s": "of it, s for the check",
    "unpack_s": "s to unpack the roster",
    "roll_bytes": "bytes of the roster",
    "freezing_ms": "ms to record the code",
    "samples": "samples counted",
    "top5": "top-5",
    "first_s": "first save, s",
    "first_bytes": "memory of it, bytes",
    "slowdown": "times as long",
}
_UNITS = {"ms": " ms", "us": " µs"}  # of a limit, by the end of the figure's name
_RATIOS = ("ratio", "times_base", "slowdown")
# Names of groups, where the key alone is unclear.
_GROUPS = {"rendezvous": "{} ranks"}


def rows(record: Record) -> list[tuple[str, ...]]:
    """Return a head and a row for each arm of a record, without columns that are empty."""
    cells = [
        (name, {HEADS[key]: _cell(key, arm[key]) for key in HEADS if key in arm})
        for name, arm in _arms_of(record)
    ]
    heads = [head for head in dict.fromkeys(HEADS.values()) if any(head in row for _, row in cells)]
    return [
        ("median [95 % interval]", *heads),
        *((name, *(row.get(head, "") for head in heads)) for name, row in cells),
    ]


def outcomes(record: Record) -> Iterator[tuple[str, str, str, str]]:
    """Yield each outcome of a record: its subject, the figure with interval, target, outcome."""
    for name, arm in _arms_of(record):
        targets = _targets(arm)
        for key, target in targets.items():
            form = ".3f" if abs(arm[key]["median"]) < 10 else ".1f"
            subject = f"{name}, {key}" if len(targets) > 1 else name
            limit = target["limit"] + _UNITS.get(key.rpartition("_")[2], "")
            yield subject, describe(arm[key], form), limit, target["outcome"]


def _targets(arm: Record) -> Record:
    """Return the targets of an arm; an arm of `hostlist` has one, whose unit tells the figure."""
    if "target" not in arm:
        return arm.get("targets", {})
    key = "us" if arm["target"].endswith(" µs") else "times_base"
    return {key: {"limit": arm["target"].removesuffix(" µs"), "outcome": arm["outcome"]}}


def _arms_of(record: Record) -> Iterator[tuple[str, Record]]:
    name = _GROUPS.get(record.get("benchmark", ""), "{}")
    return _arms({name.format(key): part for key, part in record["results"].items()})


def _arms(part: Record, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Record]]:
    for name, value in part.items():
        if HEADS.keys() & value.keys():
            yield ", ".join((*path, name)), value
        else:
            yield from _arms(value, (*path, name))


def _cell(key: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    ratio = key in _RATIOS
    if value["low"] == value["high"] == float(ratio):
        return "base" if ratio else ""
    size = abs(value["median"]) or 1
    digits = 3 if ratio else min(max(2 - math.floor(math.log10(size)), 0), 4)
    return describe(value, f",.{digits}f")
