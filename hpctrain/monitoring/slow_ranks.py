"""The rule by which a rank is slow."""

import statistics
from collections.abc import Sequence

__all__ = ["slow_ranks"]


def slow_ranks(seconds: Sequence[float], a_step: float) -> list[int]:
    """Return the ranks that are much slower than the others.

    A slow rank takes more than 1.5 times the median (of two ranks, the time of the faster one), and
    exceeds the median by more than 2 ms and more than 5 % of a step.

    Args:
        seconds: time of each rank in a step for work in which ranks do not wait for each other,
            such as `data` and `forward` of timings.jsonl.
        a_step: seconds of the whole step.
    """
    median = statistics.median_low(seconds)
    limit = max(1.5 * median, median + 0.002, median + 0.05 * a_step)
    return [rank for rank, own in enumerate(seconds) if own > limit]
