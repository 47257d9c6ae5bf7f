"""Curves of any length as a few hundred points: a middle, and how far values go from it."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.monitoring.report.run_reader import Floats, Series

__all__ = ["Band", "band"]

_MOST_POINTS = 800
_BINS = 400
# No axis holds more: its margins would be infinite.
_LARGEST = 1e100


@dataclass(frozen=True, slots=True)
class Band:
    """What is drawn of a curve.

    Attributes:
        steps: at which the points are.
        middle, low, high: median, lowest and highest of the values of a point; (points,) each.
        per_point: values of a point; 1 where every value is drawn.
        missing: the steps of values that cannot be drawn: nan, inf and what no axis holds.
    """

    steps: Floats
    middle: Floats
    low: Floats
    high: Floats
    per_point: int
    missing: Floats


def band(series: Series) -> Band:
    """Thin a curve, where that is needed."""
    steps, values = np.asarray(series.steps), np.asarray(series.values)
    fine = np.abs(values) <= _LARGEST  # false for nan as well
    missing = np.unique(steps[~fine])[:_BINS]
    steps, values = steps[fine], values[fine]
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    if len(steps) <= _MOST_POINTS:
        return Band(steps, values, values, values, 1, missing)
    ends = np.linspace(0, len(steps), _BINS + 1).astype(int)
    pairs = list(itertools.pairwise(ends))

    def of_each(function: Any, numbers: Floats) -> Floats:
        return np.array([function(numbers[begin:end]) for begin, end in pairs])

    return Band(
        of_each(np.median, steps),
        of_each(np.median, values),
        of_each(np.min, values),
        of_each(np.max, values),
        round(len(steps) / _BINS),
        missing,
    )
