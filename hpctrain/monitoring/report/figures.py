"""Figures in a light and a dark version for the page, and as PNG for papers and slides."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from hpctrain.cluster.texts import printable
from hpctrain.monitoring import drawing

__all__ = ["DASHES", "MARK", "PALETTE", "Drawn", "Sheet", "color", "sheet", "sketching", "style"]

# Mark in pages and PNGs that distinguishes them from other files.
MARK = "written by hpctrain report"
# Colours for all kinds of colour vision and both backgrounds (after Okabe and Ito); curves also
# differ in markers or dashes. The first colour of each pair is for a light background.
PALETTE = (
    *(("#0072b2", "#56b4e9"), ("#d55e00", "#ff8c42"), ("#009e73", "#34d1a5")),
    *(("#b0508a", "#f0a6d0"), ("#5a5a5a", "#c8c8c8"), ("#997700", "#e6c229")),
)
_INK, _GRID = ("#22262b", "#e4e7eb"), ("#d4d8dd", "#3b4148")
DASHES = ("solid", "dashed", "dashdot", "dotted")
# Not as many as colours, so that a pair of colour and marker repeats late.
_MARKERS = "os^DvPX"
_MARKED = 8  # number of markers on a long curve
_INCHES = (4.2, 2.6)
_FEW = 40  # maximum number of points that each have a marker
# Inches: margins around the axes, a label at the y axis, and a line of the legend.
_LEFT, _RIGHT, _BOTTOM, _NO_TITLE, _TITLE = 0.58, 0.12, 0.45, 0.14, 0.32
_LABEL = 0.18
_LEGEND_LINE = 0.18
_DPI = 200  # resolution of a PNG
_RC: Any = {
    "axes.edgecolor": _GRID[0],
    "axes.grid": True,
    "axes.labelcolor": _INK[0],
    "axes.labelsize": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "font.size": 8,
    "grid.color": _GRID[0],
    "grid.linewidth": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.labelcolor": _INK[0],
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": MARK,
    "text.color": _INK[0],
    "xtick.color": _INK[0],
    "ytick.color": _INK[0],
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A finished figure.

    Attributes:
        name: name of its file, without suffix.
        title, alt, caption: texts for readers; `alt` is for screen readers.
        light, dark: SVG without background, for a light and a dark page.
        png: PNG on white, with the title.
    """

    name: str
    title: str
    alt: str
    caption: str
    light: str
    dark: str
    png: bytes


@contextlib.contextmanager
def sketching() -> Iterator[None]:
    """Use the report's own style, independent of the user's matplotlibrc."""
    with warnings.catch_warnings(), mpl.rc_context():
        # Matplotlib warns of glyphs that its fonts lack; a browser's fonts may have them.
        warnings.simplefilter("ignore", UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def color(number: int) -> str:
    """Return the colour of a run or metric on a light background; six colours repeat."""
    return PALETTE[number % len(PALETTE)][0]


def style(number: int, points: int, alone: bool) -> dict[str, Any]:
    """Return colour and markers of a curve; a long curve has few markers, or none if it is alone.

    Args:
        number: number of the run, or of the metric in its panel.
        points: number of points of the curve.
        alone: whether the figure has no other curve.
    """
    few = points <= _FEW
    return {
        "color": color(number),
        "marker": _MARKERS[number % len(_MARKERS)] if few or not alone else "",
        "markevery": 1 if few else points // _MARKED,
    }


class Sheet:
    """An unfinished figure: draw on `axes`, then call `done`.

    Args:
        rows: number of axes, one above the other, with a common x axis.

    Attributes:
        axes: axes of matplotlib, from top to bottom.
    """

    def __init__(self, rows: int = 1) -> None:
        self._figure = Figure(figsize=_INCHES)
        self._bottom = _BOTTOM
        self.axes: list[Any] = list(self._figure.subplots(rows, sharex=True, squeeze=False)[:, 0])

    def legend(self, lines: list[Any], names: list[str]) -> None:
        """Add a legend below the axes; the figure grows by its height."""
        shorter = [_shortened(name, 34) for name in names]
        columns = 2 if max(map(len, shorter)) <= 24 else 1
        height = _LEGEND_LINE * -(-len(names) // columns)
        self._bottom += height
        self._figure.set_size_inches(_INCHES[0], _INCHES[1] + height)
        drawing.legend(self._figure, lines, shorter, loc="lower center", ncols=columns)

    def done(self, name: str, title: str, alt: str, caption: str) -> Drawn:
        """Return the figure in all its formats.

        Args:
            name: name of its file, without suffix.
            title, alt, caption: as in `Drawn`.
        """
        self._place(_NO_TITLE)
        for patch in (self._figure.patch, *(axes.patch for axes in self.axes)):
            patch.set_visible(False)
        vector = io.StringIO()
        # Use the canvas, because savefig draws everything twice.
        canvas: Any = FigureCanvasSVG(self._figure)
        canvas.print_svg(vector, metadata={"Date": None, "Creator": None})
        light = dark = vector.getvalue()
        for on_light, on_dark in (*PALETTE, _INK, _GRID):
            dark = dark.replace(on_light, on_dark)
        self._place(_TITLE)
        self._figure.patch.set_visible(True)
        self._figure.dpi = _DPI
        self.axes[0].set_title(printable(_shortened(title, 60)), size=9, parse_math=False)
        pixels = io.BytesIO()
        canvas = FigureCanvasAgg(self._figure)
        canvas.print_png(pixels, metadata={"Software": MARK})
        return Drawn(name, title, alt, caption, light, dark, pixels.getvalue())

    def _place(self, top: float) -> None:
        """Set the margins, because layout engines of matplotlib take as long as a draw.

        Args:
            top: margin above the axes, in inches.
        """
        width, height = self._figure.get_size_inches()
        left = _LEFT + (_LABEL if self.axes[0].get_ylabel() else 0.0)
        self._figure.subplots_adjust(
            left / width, self._bottom / height, 1 - _RIGHT / width, 1 - top / height
        )


def sheet(xlabel: str, ylabel: str = "") -> Sheet:
    """Return a sheet with one pair of axes; the x axis has short numbers: 10k for 10,000."""
    new = Sheet()
    axes = new.axes[0]
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return new


def _shortened(text: str, most: int) -> str:
    """Return a text of limited length, without the middle of a longer text."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
