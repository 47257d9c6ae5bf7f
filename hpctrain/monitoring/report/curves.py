"""Figures of metrics over steps, and grouping of curves in figures."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from hpctrain.monitoring import drawing
from hpctrain.monitoring.report import figures, wording
from hpctrain.monitoring.report.bands import Band, band
from hpctrain.monitoring.report.figures import Drawn
from hpctrain.monitoring.report.run_reader import RecordedRun

__all__ = ["MOST_PANELS", "draw_all"]

MOST_PANELS = 24
# A loss above this multiple of its median would hide the rest of its curve on a linear axis.
_SPREAD = 1000.0
_FIRST = ("loss", "eval_loss", "accuracy", "top1", "top5")
_LAST = ("lr", "samples_per_second", "data_wait", "gpu_memory")
_TITLES = {
    "lr": "learning rate",
    "samples_per_second": "throughput (samples/s)",
    "data_wait": "waiting for data (share of the time)",
    "gpu_memory": "GPU memory, peak of rank 0",
}
_FORMATS: dict[str, Callable[[], Any]] = {
    "data_wait": lambda: PercentFormatter(1.0),
    "gpu_memory": lambda: EngFormatter("B"),
    "samples_per_second": lambda: EngFormatter(sep=""),
}
# Per run; more lines would hide the curves.
_MOST_RESTARTS = 50
# File names of the figures that show no metrics.
_OF_STEPS = re.compile(r"step-times|ranks(-\d+)?")
_FROM_ZERO = ("lr", "samples_per_second", "data_wait", "gpu_memory")


@dataclass(frozen=True, slots=True)
class _Curve:
    label: str
    number: int
    band: Band


def draw_all(runs: Sequence[RecordedRun]) -> tuple[list[Drawn], int]:
    """Draw the metrics over steps; return the figures and the number of omitted ones.

    For one run, all losses share a figure and so do all accuracies. For several runs, each figure
    shows one metric.
    """
    members: dict[str, list[tuple[RecordedRun, int, str]]] = {}
    for number, run in enumerate(runs):
        for name in run.series:
            title = drawing.panel_of(name) if len(runs) == 1 else name
            members.setdefault(title, []).append((run, number, name))
    order = {name: place for place, name in enumerate((*_FIRST, None, *_LAST))}
    titles = sorted(members, key=lambda title: order.get(title, len(_FIRST)))
    shown = titles[:MOST_PANELS]
    drawn = []
    for title, stem in zip(shown, _stems(shown), strict=True):
        if len(runs) == 1:
            curves = [
                _Curve(wording.text(name), place, band(run.series[name]))
                for place, (run, _, name) in enumerate(members[title])
            ]
        else:
            curves = [
                _Curve(run.label, number, band(run.series[name]))
                for run, number, name in members[title]
            ]
        drawn.append(_draw(stem, title, curves, runs))
    return drawn, len(titles) - len(shown)


def _stems(titles: Sequence[str]) -> list[str]:
    """Return unique file names for the titles, distinct from those of `steps`."""
    stems: list[str] = []
    for title in titles:
        first = re.sub(r"[^A-Za-z0-9]+", "-", title)[:40].strip("-").lower() or "metric"
        if _OF_STEPS.fullmatch(first):
            first = f"metric-{first}"
        stem = first
        count = 1
        while stem in stems:
            count += 1
            stem = f"{first}-{count}"
        stems.append(stem)
    return stems


def _draw(stem: str, name: str, curves: Sequence[_Curve], runs: Sequence[RecordedRun]) -> Drawn:
    sheet = figures.sheet("step")
    axes = sheet.axes[0]
    lines = []
    for curve in curves:
        drawn, alone = curve.band, len(curves) == 1
        style = figures.style(curve.number, len(drawn.steps), alone)
        lines += axes.plot(drawn.steps, drawn.middle, **style)
        if drawn.per_point > 1:
            axes.fill_between(drawn.steps, drawn.low, drawn.high, color=style["color"], alpha=0.2)
        if len(drawn.missing):  # at the upper edge, because the values have no place on the axis
            axes.plot(
                *(drawn.missing, np.ones_like(drawn.missing)),
                color=style["color"],
                linestyle="",
                marker="x",
                clip_on=False,
                transform=axes.get_xaxis_transform(),
            )
    _mark_restarts(axes, curves, runs)
    _scale(axes, name, curves)
    if len(runs) > 1 or len(curves) > 1:
        sheet.legend(lines, [curve.label for curve in curves])
    title = _TITLES.get(name, wording.text(name))
    if len(runs) == 1 and len(curves) == 1 and curves[0].label != wording.text(name):
        title = f"{title}: {curves[0].label}"
    alt = f"{title} over steps. " + " ".join(map(_describe, curves))
    return sheet.done(stem, title, alt, _caption(curves, runs))


def _mark_restarts(axes: Any, curves: Sequence[_Curve], runs: Sequence[RecordedRun]) -> None:
    """Draw a dotted line at each restart; for several runs in the colour of the run."""
    for run, number in _shown(curves, runs):
        color = figures.color(number) if len(runs) > 1 else figures.color(4)
        for step in run.restarts[-_MOST_RESTARTS:]:
            axes.axvline(step, color=color, linestyle=(0, (1, 2)), linewidth=1.0)


def _shown(curves: Sequence[_Curve], runs: Sequence[RecordedRun]) -> list[tuple[RecordedRun, int]]:
    """Return the runs in a figure, with their numbers."""
    if len(runs) == 1:
        return [(runs[0], 0)]
    return [(runs[curve.number], curve.number) for curve in curves]


def _scale(axes: Any, name: str, curves: Sequence[_Curve]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    middles = np.concatenate([curve.band.middle for curve in curves])
    highest = max((curve.band.high.max() for curve in curves if len(curve.band.high)), default=0.0)
    lowest = min((curve.band.low.min() for curve in curves if len(curve.band.low)), default=0.0)
    if "loss" in name and lowest > 0 and highest > _SPREAD * np.median(middles):
        axes.set_yscale("log")
        return
    if name in _FORMATS:
        axes.yaxis.set_major_formatter(_FORMATS[name]())
    elif len(middles):
        axes.ticklabel_format(axis="y", useOffset=False)
    if name in _FROM_ZERO and highest > 0:
        axes.set_ylim(bottom=0.0)


def _describe(curve: _Curve) -> str:
    """Return a sentence about the first and the last value of a curve."""
    drawn = curve.band
    if not len(drawn.steps):
        return f"{curve.label}: no finite value."
    first, last = (wording.number(float(drawn.middle[place])) for place in (0, -1))
    begin, end = (wording.number(int(drawn.steps[place])) for place in (0, -1))
    return f"{curve.label}: {first} at step {begin}, {last} at step {end}."


def _caption(curves: Sequence[_Curve], runs: Sequence[RecordedRun]) -> str:
    """Return the explanation of the marks in a figure."""
    sentences = []
    thick = [curve.band.per_point for curve in curves if curve.band.per_point > 1]
    if thick:
        sentences.append(
            f"Line: the median of every {wording.number(max(thick))} rows; area: their lowest to "
            "highest."
        )
    if any(len(curve.band.missing) for curve in curves):
        sentences.append("Crosses: values that are not finite.")
    steps = sorted({step for run, _ in _shown(curves, runs) for step in run.restarts})
    if steps:
        named = ", ".join(map(wording.number, steps[:5])) + (", …" if len(steps) > 5 else "")
        sentences.append(f"Dotted: training continued after a restart at step {named}.")
    return " ".join(sentences)
