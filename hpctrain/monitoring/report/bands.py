"""Reduction of curves to a few hundred points, each with median and range."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.monitoring.report.run_reader import Floats, Series

__all__ = ["Band", "band"]

_MOST_POINTS = 800
_BINS = 400
# Larger values have no place on an axis: its margins would be infinite.
_LARGEST = 1e100


@dataclass(frozen=True, slots=True)
class Band:
    """Points of a curve for drawing.

    Attributes:
        steps: steps of the points, shape (points,).
        middle, low, high: median, lowest and highest value of each point, shape (points,) each.
        per_point: number of values per point; 1 if every value is drawn.
        missing: steps of values that cannot be drawn: nan, inf and values too large for an axis.
    """

    steps: Floats
    middle: Floats
    low: Floats
    high: Floats
    per_point: int
    missing: Floats


def band(series: Series) -> Band:
    """Reduce a curve to a band; a short curve keeps all its values."""
    steps, values = np.asarray(series.steps), np.asarray(series.values)
    fine = np.abs(values) <= _LARGEST  # also false for nan
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
