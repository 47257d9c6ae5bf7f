"""Summary of timings.jsonl: times of steps, and ranks that the others wait for."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from hpctrain.monitoring import drawing
from hpctrain.monitoring.slow_ranks import slow_ranks

__all__ = ["RankTimes", "TimingsSummary", "edge", "gather", "is_step", "quantile"]

# Bucket k begins at 10^(k/20) microseconds; the last one has steps of about a quarter of an hour.
_PER_DECADE = 20
_BUCKETS = range(180)
# Above this number, floats cannot represent every step.
_MOST_STEPS = 2**53
_LONGEST = 1e10  # seconds, more than three centuries


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Mean times of one rank per step.

    Attributes:
        host: name of the host.
        data: seconds of waiting for data.
        forward: seconds from the batch to the backward pass.
        slow_data, slow_forward: whether the other ranks wait for this rank for this reason.
    """

    host: str
    data: float
    forward: float
    slow_data: bool
    slow_forward: bool


@dataclass(frozen=True, slots=True)
class TimingsSummary:
    """Sum of all intervals of a run.

    Attributes:
        buckets: number of rank 0's steps by bucket, over all starts.
        ranks: mean times by rank, over the last intervals with the same hosts.
        steps: number of steps in these means.
    """

    buckets: Counter[int] = field(default_factory=Counter)
    ranks: tuple[RankTimes, ...] = ()
    steps: int = 0


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


def is_step(value: Any) -> TypeGuard[int]:
    """Return whether a value of a file is a step or a number of steps."""
    return type(value) is int and 0 <= value <= _MOST_STEPS


def gather(lines: Iterable[Mapping[str, Any]]) -> TimingsSummary:
    """Add up the intervals; invalid entries of a line are left out.

    Args:
        lines: lines of timings.jsonl.
    """
    buckets: Counter[int] = Counter()
    hosts: tuple[str, ...] = ()
    data: list[float] = []
    forward: list[float] = []
    steps = 0
    for line in lines:
        buckets.update(_buckets(line.get("step_times")))
        found: list[Any] = [line.get(key) for key in ("hosts", "data", "forward", "steps")]
        names, data_means, forward_means, count = found
        if not is_step(count) or not count or not _fit(names, data_means, forward_means):
            continue
        if tuple(names) != hosts:  # other ranks than before: restart the means
            hosts, steps = tuple(names), 0
            data, forward = [0.0] * len(names), [0.0] * len(names)
        data = [total + count * mean for total, mean in zip(data, data_means, strict=True)]
        forward = [total + count * mean for total, mean in zip(forward, forward_means, strict=True)]
        steps += count
    if not steps:
        return TimingsSummary(buckets)
    step = quantile(buckets, 0.5) if buckets else 0.0
    means = [[total / steps for total in totals] for totals in (data, forward)]
    slow = [set(slow_ranks(seconds, step)) for seconds in means]
    ranks = (
        RankTimes(host, wait, work, number in slow[0], number in slow[1])
        for number, (host, wait, work) in enumerate(zip(hosts, *means, strict=True))
    )
    return TimingsSummary(buckets, tuple(ranks), steps)


def _buckets(found: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    for name, count in found.items() if isinstance(found, dict) else ():
        try:
            bucket = int(name)
        except ValueError:
            continue
        if bucket in _BUCKETS and is_step(count) and count:
            counts[bucket] = count
    return counts


def _fit(hosts: Any, *means: Any) -> bool:
    """Return whether the lists are valid: a host and valid seconds for each rank."""
    lists = (hosts, *means)
    return (
        all(isinstance(values, list) for values in lists)
        and len({len(values) for values in lists}) == 1
        and bool(hosts)
        and all(isinstance(host, str) for host in hosts)
        and all(
            drawing.is_number(mean) and 0 <= mean < _LONGEST for values in means for mean in values
        )
    )
