"""Summary of timings.jsonl: times of steps, and ranks that the others wait for."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.monitoring.curves import Floats
from hpctrain.monitoring.slow_ranks import slow_ranks

__all__ = ["StepTimes", "edge", "gather", "quantile"]

# Bucket k begins at 10^(k/20) microseconds.
_PER_DECADE = 20
_KINDS = ("data", "forward")


@dataclass(slots=True)
class StepTimes:
    """Sum of all intervals of a run.

    Attributes:
        buckets: number of rank 0's steps by bucket, over all starts.
        hosts: host of each rank, at the last start.
        means: seconds per step of waiting for data, and of the forward pass, by rank; over the last
            intervals with the same hosts. Shape (2, ranks).
        steps: number of steps in these means.
        slow: ranks that the others wait for, for each row of `means`.
    """

    buckets: Counter[int] = field(default_factory=Counter)
    hosts: list[str] = field(default_factory=list)
    means: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    steps: int = 0
    slow: tuple[list[int], list[int]] = ([], [])


def edge(bucket: int) -> float:
    """Return the seconds at which a bucket begins."""
    return float(10 ** (bucket / _PER_DECADE)) * 1e-6


def quantile(buckets: Mapping[int, int], share: float) -> float:
    """Return the seconds that a share of the steps does not exceed: the end of their bucket."""
    wanted = share * sum(buckets.values())
    count = 0
    for bucket in sorted(buckets):
        count += buckets[bucket]
        if count >= wanted:
            return edge(bucket + 1)
    return math.nan


def gather(lines: Iterable[Mapping[str, Any]]) -> StepTimes:
    """Add up the lines of timings.jsonl; a line without all of its fields is left out."""
    found = StepTimes()
    for line in lines:
        try:
            buckets = {int(bucket): count for bucket, count in line["step_times"].items()}
            hosts, steps = line["hosts"], line["steps"]
            means = np.array([line[kind] for kind in _KINDS], dtype=float)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        found.buckets.update(buckets)
        if hosts != found.hosts:  # other ranks than before: restart the means
            found.hosts, found.steps, found.means = hosts, 0, np.zeros_like(means)
        total = found.steps + steps
        found.means = (found.means * found.steps + means * steps) / total
        found.steps = total
    if found.hosts:
        step = quantile(found.buckets, 0.5)
        data, forward = (slow_ranks(seconds.tolist(), step) for seconds in found.means)
        found.slow = data, forward
    return found
