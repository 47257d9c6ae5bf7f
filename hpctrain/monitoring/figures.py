"""Figures of runs in one style: SVG for the report, and one PNG of all curves for notebooks."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter, ScalarFormatter

from hpctrain.cluster.texts import printable
from hpctrain.monitoring.curves import Curve, Panel

__all__ = ["PALETTE", "color", "draw", "figure", "legend", "png", "style", "svg"]

# Colours for all kinds of colour vision (after Okabe and Ito); curves differ in markers as well.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#5a5a5a", "#997700")
_MARKERS = "os^DvPX"  # not as many as colours, so that a pair of both repeats late
_FEW, _MARKED = 40, 8  # points that each have a marker; markers on a longer curve
_INCHES = (4.2, 2.8)
_LEGEND_LINE = 0.18
_COLUMNS = 3  # panels beside each other in one figure
# A loss above this multiple of its median would hide the rest of its curve on a linear axis.
_SPREAD = 1000.0
# Metrics of the machine, whose axes begin at zero: titles and formats.
_KNOWN: dict[str, tuple[str, Callable[[], Any]]] = {
    "lr": ("learning rate", lambda: ScalarFormatter(useOffset=False)),
    "samples_per_second": ("throughput (samples/s)", lambda: EngFormatter(sep="")),
    "data_wait": ("waiting for data (share of the time)", lambda: PercentFormatter(1.0)),
    "gpu_memory": ("GPU memory, peak of rank 0", lambda: EngFormatter("B")),
}
_GRID = "#d4d8dd"
_RC: Any = {
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 8,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 150,
    "svg.fonttype": "none",
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Use the style of these figures, independent of the user's matplotlibrc."""
    with warnings.catch_warnings(), mpl.rc_context():
        # Matplotlib warns of glyphs that its fonts lack; a browser's fonts may have them.
        warnings.simplefilter("ignore", UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def figure(columns: int = 1, rows: int = 1, legend_lines: int = 0) -> Figure:
    """Return an empty figure.

    Args:
        columns, rows: number of panels beside and above each other.
        legend_lines: number of names in the legend of a panel.
    """
    # Without pyplot, which would choose a backend for the whole process.
    inches = (_INCHES[0] * columns, (_INCHES[1] + _LEGEND_LINE * legend_lines) * rows)
    return Figure(figsize=inches, layout="constrained")


def color(number: int) -> str:
    """Return the colour of a run or metric; six colours repeat."""
    return PALETTE[number % len(PALETTE)]


def svg(drawn: Figure) -> str:
    """Return a figure as SVG without background."""
    file = io.StringIO()
    # The canvas, because savefig draws everything twice.
    canvas: Any = FigureCanvasSVG(drawn)
    for patch in (drawn.patch, *(axes.patch for axes in drawn.axes)):
        patch.set_visible(False)
    canvas.print_svg(file, metadata={"Date": None, "Creator": None})
    return file.getvalue()


def png(panels: Sequence[Panel], title: str) -> bytes:
    """Return one figure of all panels as a PNG.

    Args:
        panels: panels, row by row.
        title: text above the figure; any characters.
    """
    content = io.BytesIO()
    columns = max(min(len(panels), _COLUMNS), 1)
    rows = max(-(-len(panels) // columns), 1)
    with style():
        lines = max((len(panel.curves) for panel in panels), default=0)
        whole = figure(columns, rows, lines)
        # parse_math=False: a $ in a name stays a $.
        whole.suptitle(printable(title), parse_math=False)
        parts = whole.subfigures(rows, columns, squeeze=False).flat
        for part, panel in zip(parts, panels, strict=False):
            draw(part, panel)
        FigureCanvasAgg(whole).print_png(content)  # type: ignore[no-untyped-call]
    return content.getvalue()


def legend(parent: Any, lines: Iterable[Any], names: Iterable[str]) -> None:
    """Add a legend below the axes of a figure, which shows any text unchanged."""
    labels = [shortened(printable(name), 34) for name in names]
    columns = 2 if max(map(len, labels)) <= 20 else 1
    shown = parent.legend(list(lines), labels, loc="outside lower center", ncols=columns)
    for text in shown.get_texts():
        text.set_parse_math(False)


def shortened(text: str, most: int) -> str:
    """Return a text of limited length, without the middle of a longer text."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def title_of(panel: Panel) -> str:
    """Return the title of a panel."""
    return _KNOWN[panel.name][0] if panel.name in _KNOWN else printable(panel.name)


def draw(parent: Any, panel: Panel) -> None:
    """Draw the curves of a panel.

    Args:
        parent: empty figure, or a part of one.
        panel: panel with the curves.
    """
    axes = parent.add_subplot()
    axes.set_xlabel("step")
    axes.set_title(shortened(title_of(panel), 60), parse_math=False)
    alone = len(panel.curves) == 1
    lines = [
        _draw_curve(axes, curve, number, alone)
        for curve, number in zip(panel.curves, panel.numbers, strict=True)
    ]
    _scale(axes, panel)
    if not alone or panel.curves[0].label != panel.name:
        legend(parent, lines, [curve.label for curve in panel.curves])


def _draw_curve(axes: Any, curve: Curve, number: int, alone: bool) -> Any:
    """Draw a curve; crosses mark values without a place on the axis, dotted lines restarts."""
    hue, few = color(number), len(curve.steps) <= _FEW
    (line,) = axes.plot(
        curve.steps,
        curve.middle,
        color=hue,
        marker=_MARKERS[number % len(_MARKERS)] if few or not alone else "",
        markevery=1 if few else len(curve.steps) // _MARKED,
    )
    if curve.per_point > 1:
        axes.fill_between(curve.steps, curve.low, curve.high, color=hue, alpha=0.2, linewidth=0)
    for step in curve.restarts:
        axes.axvline(step, color=hue, linestyle=(0, (1, 2)), linewidth=1.0)
    if len(curve.missing):
        place, edge = axes.get_xaxis_transform(), np.ones_like(curve.missing)
        axes.plot(curve.missing, edge, "x", color=hue, clip_on=False, transform=place)
    return line


def _scale(axes: Any, panel: Panel) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    values = np.concatenate([each for curve in panel.curves for each in (curve.low, curve.high)])
    if not len(values):
        return
    if "loss" in panel.name and values.min() > 0 and values.max() > _SPREAD * np.median(values):
        axes.set_yscale("log")
        return
    _, formatter = _KNOWN.get(panel.name, _KNOWN["lr"])
    axes.yaxis.set_major_formatter(formatter())
    if panel.name in _KNOWN and values.max() > 0:
        axes.set_ylim(bottom=0.0)
