"""Summary of timings.jsonl: times of steps, and ranks that the others wait for."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.monitoring.curves import Floats, is_step
from hpctrain.monitoring.slow_ranks import slow_ranks

__all__ = ["StepTimes", "edge", "gather", "quantile"]

# Bucket k begins at 10^(k/20) microseconds; the last one has steps of about a quarter of an hour.
_PER_DECADE = 20
_BUCKETS = {str(bucket): bucket for bucket in range(180)}
_LONGEST = 1e10  # seconds, more than three centuries
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
    """Add up the lines of timings.jsonl; what is invalid in a line is left out."""
    found = StepTimes()
    for line in lines:
        found.buckets.update(_buckets(line.get("step_times")))
        try:
            steps, hosts = line["steps"], line["hosts"]
            means = np.array([line[kind] for kind in _KINDS], dtype=float)
            valid = is_step(steps) and isinstance(hosts, list) and means.shape == (2, len(hosts))
            if not (valid and steps and hosts and ((means >= 0) & (means < _LONGEST)).all()):
                continue
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if hosts != found.hosts:  # other ranks than before: restart the means
            found.hosts, found.steps, found.means = hosts, 0, np.zeros_like(means)
        total = found.steps + steps
        found.means = (found.means * found.steps + means * steps) / total
        found.steps = total
    if found.hosts:
        step = quantile(found.buckets, 0.5) if found.buckets else 0.0
        data, forward = (slow_ranks(seconds.tolist(), step) for seconds in found.means)
        found.slow = data, forward
    return found


def _buckets(found: Any) -> dict[int, int]:
    counts = found.items() if isinstance(found, dict) else ()
    return {_BUCKETS[name]: n for name, n in counts if name in _BUCKETS and is_step(n) and n}
