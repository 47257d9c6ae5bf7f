"""Curves of runs: values of metrics by step, in panels, and reduced to what a figure can show."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.monitoring.drawing import HEADS, is_number

__all__ = ["Curve", "Floats", "History", "Panel", "Series", "collect", "panels"]

Floats = NDArray[np.float64]

_MOST_POINTS, _BINS = 800, 400
# Larger values have no place on an axis: its margins would be infinite.
_LARGEST = 1e100
_FIRST = ("loss", "eval_loss", "accuracy", "top1", "top5")
_LAST = ("lr", "samples_per_second", "data_wait", "gpu_memory")


@dataclass(slots=True)
class Series:
    """Values of one metric in the order of the file; a value may be nan or infinite."""

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def finite(self) -> tuple[Floats, Floats]:
        """Return steps and values of the finite values."""
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        fine = np.isfinite(values)
        return steps[fine], values[fine]


def collect(
    rows: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Series], Mapping[str, Any]]:
    """Return the series of rows of metrics.jsonl by name, and the last row that has a step."""
    series = defaultdict[str, Series](Series)
    last: Mapping[str, Any] = {}
    for row in rows:
        step = row.get("step")
        if type(step) is not int:
            continue
        last = row
        for name, value in row.items():
            if is_number(value) and name not in HEADS:
                series[name].steps.append(step)
                series[name].values.append(value)
    return series, last


@dataclass(slots=True)
class History:
    """What the curves of a run are drawn from.

    Attributes:
        label: short name, unique among the runs of a figure.
        series: values by name of metric.
        restarts: steps at which later starts continued.
    """

    label: str
    series: dict[str, Series]
    restarts: list[int]


class Curve:
    """Points of a metric; many values become few points, each with median and range.

    Args:
        label: name in the legend.
        series: values of the metric.
        restarts: steps at which the run was started again.

    Attributes:
        label, restarts: the arguments.
        steps, middle, low, high: steps, medians, lowest and highest values, shape (points,) each.
        per_point: number of values per point; 1 if every value is drawn.
        missing: steps of values that cannot be drawn: nan, inf and values too large for an axis.
    """

    def __init__(self, label: str, series: Series, restarts: Sequence[int] = ()) -> None:
        self.label, self.restarts = label, restarts
        steps, values = np.asarray(series.steps), np.asarray(series.values)
        fine = np.abs(values) <= _LARGEST  # also false for nan
        self.missing = np.unique(steps[~fine])[:_BINS]
        order = np.argsort(steps[fine], kind="stable")
        steps, values = steps[fine][order], values[fine][order]
        many = len(steps) > _MOST_POINTS
        self.per_point = round(len(steps) / _BINS) if many else 1
        bins = np.array_split(values, _BINS) if many else []
        self.steps = (
            np.array([np.median(b) for b in np.array_split(steps, _BINS)]) if many else steps
        )
        self.middle = np.array([np.median(b) for b in bins]) if many else values
        self.low = np.array([b.min() for b in bins]) if many else values
        self.high = np.array([b.max() for b in bins]) if many else values


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that share a pair of axes.

    Attributes:
        name: name of the metric, "loss" or "accuracy".
        curves: curves; those of several runs have the numbers of the runs.
        numbers: number of each curve, which gives its colour.
    """

    name: str
    curves: list[Curve]
    numbers: list[int]


def panels(runs: Sequence[History]) -> list[Panel]:
    """Group the metrics of runs into panels: losses and accuracies first, the machine last.

    Those of one run share a panel for all losses, and one for all accuracies. For several runs,
    each panel has one metric, with a curve for each run.
    """
    alone = len(runs) == 1
    grouped: dict[str, Panel] = {}
    for number, run in enumerate(runs):
        for name, series in run.series.items():
            title = _group(name) if alone else name
            panel = grouped.setdefault(title, Panel(title, [], []))
            first = not panel.curves or not alone  # curves of one run have the same restarts
            panel.numbers.append(len(panel.curves) if alone else number)
            label = name if alone else run.label
            panel.curves.append(Curve(label, series, run.restarts if first else ()))
    order = {name: place for place, name in enumerate((*_FIRST, "", *_LAST))}
    return sorted(grouped.values(), key=lambda panel: order.get(panel.name, len(_FIRST)))


def _group(name: str) -> str:
    return "loss" if "loss" in name else "accuracy" if name.startswith("top") else name
