"""HTML page of a report: an escaping template with all facts, and the curves as SVG."""

import base64
import io
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from hpctrain._version import __version__
from hpctrain.cluster.texts import printable
from hpctrain.monitoring.report import facts
from hpctrain.monitoring.report.runs import Floats, RecordedRun

# Mark of a page that distinguishes it from other files.
MARK = "written by hpctrain report"
_MAX_FIGURES = 24
# Colours for all kinds of colour vision (after Okabe and Ito); curves differ in markers as well.
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#5a5a5a", "#997700")
_MARKERS = "os^DvPX"  # not as many as colours, so that a pair of both repeats late
_MAX_POINTS, _BINS = 800, 400
# Larger values have no place on an axis: its margins would be infinite.
_MAX_VALUE = 1e100
# A loss of a larger range than this has a logarithmic axis.
_SPREAD = 1e4
_FIRST = ("loss", "eval_loss", "accuracy", "top1", "top5")
# Metrics with their own titles and formats; they come last, and their axes begin at zero.
_LAST: dict[str, tuple[str, Any]] = {
    "lr": ("learning rate", None),
    "samples_per_second": ("throughput (samples/s)", EngFormatter(sep="")),
    "data_wait": ("waiting for data (share of the time)", PercentFormatter(1.0)),
    "gpu_memory": ("GPU memory, peak of rank 0", EngFormatter("B")),
}


def render(runs: Sequence[RecordedRun]) -> str:
    """Return the page in ASCII, so that names of runs cause no encoding errors."""
    files = jinja2.FileSystemLoader(Path(__file__).parent)
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(loader=files, autoescape=True, undefined=strict)
    environment.filters["text"] = lambda value: facts.text(str(value))
    # The style is independent of the user's matplotlibrc.
    with warnings.catch_warnings(), mpl.rc_context():
        # Matplotlib warns of glyphs that its fonts lack; a browser's fonts may have them.
        warnings.simplefilter("ignore", UserWarning)
        mpl.rcdefaults()
        mpl.rc("axes", grid=True, edgecolor="#d4d8dd", titlelocation="left", titleweight="bold")
        mpl.rc("axes.spines", right=False, top=False)
        mpl.rc("axes.formatter", useoffset=False)
        mpl.rc("text", parse_math=False)  # a $ in a name stays a $
        mpl.rcParams.update({"font.size": 8, "grid.color": "#d4d8dd", "svg.fonttype": "none"})
        figures = _figures(runs)
    page = environment.get_template("page.html").render(
        facts=facts,
        figures=figures[:_MAX_FIGURES],
        mark=MARK,
        now=time.time(),
        omitted=len(figures[_MAX_FIGURES:]),
        palette=_PALETTE,
        runs=runs,
        version=__version__,
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


# Label, position in the palette, points, and steps of restarts.
_Curve = tuple[str, int, tuple[Floats, Floats], Sequence[int]]


def _figures(runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    """Return images and descriptions of all metrics over steps; the speed of the machine is last.

    All losses of one run share a figure, and all accuracies. Several runs share each figure.
    """
    grouped: dict[str, list[_Curve]] = {}
    for position, run in enumerate(runs):
        for name, points in run.series.items():
            if len(runs) > 1:
                grouped.setdefault(name, []).append((run.label, position, points, run.restarts))
                continue
            group = "loss" if "loss" in name else "accuracy" if name.startswith("top") else name
            curves = grouped.setdefault(group, [])
            curves.append((name, len(curves), points, [] if curves else run.restarts))
    order = {name: place for place, name in enumerate((*_FIRST, "", *_LAST))}
    names = sorted(grouped, key=lambda name: order.get(name, len(_FIRST)))
    return [_draw(name, grouped[name]) for name in names]


def _draw(name: str, curves: Sequence[_Curve]) -> tuple[str, str]:
    """Draw curves; crosses mark values without a place on the axis, dotted lines restarts."""
    title, formatter = _LAST.get(name, (printable(name), None))
    # Without pyplot, which would choose a backend for the whole process.
    figure = Figure(figsize=(4.2, 2.8 + 0.09 * len(curves)), layout="constrained")
    axes: Any = figure.add_subplot(title=_shortened(title, 60), xlabel="step")
    lines, heights = [], []
    for _, position, (steps, values), restarts in curves:
        color, marker = (cycle[position % len(cycle)] for cycle in (_PALETTE, _MARKERS))
        fine = np.abs(values) <= _MAX_VALUE  # also false for nan
        points, low, middle, high = reduced(steps[fine], values[fine])
        line = {"color": color, "marker": marker, "markevery": max(len(points) // 8, 1)}
        lines += axes.plot(points, middle, ms=4, **line)
        if low is not high:
            axes.fill_between(points, low, high, color=color, alpha=0.2, linewidth=0)
        for step in restarts:
            axes.axvline(step, color=color, linestyle=":")
        if len(odd := np.unique(steps[~fine])[:_BINS]):
            height = axes.get_xaxis_transform()
            axes.plot(odd, np.ones_like(odd), "x", color=color, transform=height, clip_on=False)
        heights += [*low, *high]
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if heights and "loss" in name and 0 < min(heights) < max(heights) / _SPREAD:
        axes.set_yscale("log")
        formatter = "{x:g}"  # the default is a formula
    elif name in _LAST and heights:
        axes.set_ylim(bottom=min(0.0, *heights))
    if formatter:
        axes.yaxis.set_major_formatter(formatter)
    labels = [_shortened(label, 34) for label, *_ in curves]
    if labels != [name]:
        figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False)
    file, metadata = io.StringIO(), {"Date": None, "Creator": None}
    figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    # A browser runs no scripts of an SVG in an image.
    code = base64.b64encode(file.getvalue().encode(errors="replace")).decode()
    return f"data:image/svg+xml;base64,{code}", f"{title} over steps: {', '.join(labels)}."


def reduced(steps: Floats, values: Floats) -> list[Floats]:
    """Return few points of a long curve: steps, lowest values, medians and highest values.

    Up to 800 values are points themselves, with themselves as median and range.
    """
    if len(values) <= _MAX_POINTS:
        return [steps, values, values, values]
    parts = np.array_split(values, _BINS)
    middle = [np.median(part) for part in np.array_split(steps, _BINS)]
    points = zip(*((part.min(), np.median(part), part.max()) for part in parts), strict=True)
    return [np.array(middle), *map(np.array, points)]


def _shortened(text: str, most: int) -> str:
    """Return a text of limited length, without the middle of a longer text."""
    line, half = printable(text), most // 2 - 1
    return line if len(line) <= most else f"{line[:half]}…{line[-half:]}"
