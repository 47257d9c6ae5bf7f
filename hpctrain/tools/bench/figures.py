"""Results of a benchmark: arms by name, or groups of arms, and their table. No torch.

An arm is a dict of figures, each with a median and an interval, and of numbers without a spread.
Other keys than those of `HEADS` are not shown.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.tools.bench.measure import describe, spell, summary

__all__ = ["HEADS", "Results", "Series", "arms", "compare", "rows"]

Results = dict[str, Any]
# Figures of an arm by name, each with one value for each round.
Series = Mapping[str, Sequence[float]]

# Column heads by figure; their order is that of the columns.
HEADS = {
    "ms": "ms",
    "us": "µs",
    "s": "s",
    "stall_s": "s that training waits",
    "images_per_s": "images/s",
    "tokens_per_s": "tokens/s",
    "ratio": "× base",
    "whole_s": "s until on the disk",
    "gb_per_s": "GB/s",
    "tflops": "TFLOP/s",
    "busbw": "busbw GB/s",
    "images_per_s_of_a_rank": "of the slowest rank",
    "peak_memory": "peak memory",
    "more_ms": "ms more",
    "more_us": "µs more",
    "more_cpu_us": "µs more of CPU time",
    "more_s": "s more",
    "cpu_s": "s of rank 0's CPU time",
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
}
_RATIOS = ("ratio", "slowdown", "share")


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
