"""One figure for a page in light and dark, and as a PNG for papers and slides."""

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

from hpctrain.monitoring import drawing

__all__ = ["DASHES", "MARK", "PALETTE", "Drawn", "Sheet", "color", "sheet", "sketching", "style"]

# In the PNGs, which tells them from other people's.
MARK = "written by hpctrain report"
# Told apart with every kind of colour vision and on both backgrounds (after Okabe and Ito), and
# beside colour there are markers or dashes. Of each pair the first is for a light ground.
PALETTE = (
    *(("#0072b2", "#56b4e9"), ("#d55e00", "#ff8c42"), ("#009e73", "#34d1a5")),
    *(("#b0508a", "#f0a6d0"), ("#5a5a5a", "#c8c8c8"), ("#997700", "#e6c229")),
)
_INK, _GRID = ("#22262b", "#e4e7eb"), ("#d4d8dd", "#3b4148")
DASHES = ("solid", "dashed", "dashdot", "dotted")
# Not as many as colours, so that pairs of both come again late.
_MARKERS = "os^DvPX"
_MARKED = 8  # points of a long curve
_INCHES = (4.2, 2.6)
_FEW = 40  # points, each with its marker
# Inches around the axes, of a label at the y axis, and of a line of the legend.
_LEFT, _RIGHT, _BOTTOM, _NO_TITLE, _TITLE = 0.58, 0.12, 0.45, 0.14, 0.32
_LABEL = 0.18
_LEGEND_LINE = 0.18
_DPI = 200  # of a PNG
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
    """A figure as it is shown.

    Attributes:
        name: of its file, without an ending.
        title, alt, caption: for people; `alt` for those who cannot see it.
        light, dark: SVG without a background, for either one.
        png: on white, with the title.
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
    """Draw in the report's own way, whatever a person's matplotlibrc says."""
    with warnings.catch_warnings(), mpl.rc_context():
        # Of glyphs that no font here has; a browser's fonts may.
        warnings.simplefilter("ignore", UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def color(number: int) -> str:
    """The colour of a run or a metric on a light ground; after six they begin anew."""
    return PALETTE[number % len(PALETTE)][0]


def style(number: int, points: int, alone: bool) -> dict[str, Any]:
    """Colour and markers of a curve: of a long one here and there, and none where it is alone.

    Args:
        number: of the run, or of the metric in its panel.
        points: of the curve.
        alone: whether no other one is in its figure.
    """
    few = points <= _FEW
    return {
        "color": color(number),
        "marker": _MARKERS[number % len(_MARKERS)] if few or not alone else "",
        "markevery": 1 if few else points // _MARKED,
    }


class Sheet:
    """A figure under way: draw on `axes`, then `done`.

    Args:
        rows: of axes, one above the other; they share their x axis.

    Attributes:
        axes: of matplotlib, from top to bottom.
    """

    def __init__(self, rows: int = 1) -> None:
        self._figure = Figure(figsize=_INCHES)
        self._bottom = _BOTTOM
        self.axes: list[Any] = list(self._figure.subplots(rows, sharex=True, squeeze=False)[:, 0])

    def legend(self, lines: list[Any], names: list[str]) -> None:
        """Name several curves, below the axes; the figure grows by that."""
        shorter = [_shortened(name, 34) for name in names]
        columns = 2 if max(map(len, shorter)) <= 24 else 1
        high = _LEGEND_LINE * -(-len(names) // columns)
        self._bottom += high
        self._figure.set_size_inches(_INCHES[0], _INCHES[1] + high)
        drawing.legend(self._figure, lines, shorter, loc="lower center", ncols=columns)

    def done(self, name: str, title: str, alt: str, caption: str) -> Drawn:
        """The figure in all its forms.

        Args:
            name: of its file, without an ending.
            title, alt, caption: as in `Drawn`.
        """
        self._place(_NO_TITLE)
        for patch in (self._figure.patch, *(axes.patch for axes in self.axes)):
            patch.set_visible(False)
        vector = io.StringIO()
        # By the canvas: savefig draws everything twice.
        canvas: Any = FigureCanvasSVG(self._figure)
        canvas.print_svg(vector, metadata={"Date": None, "Creator": None})
        light = dark = vector.getvalue()
        for on_light, on_dark in (*PALETTE, _INK, _GRID):
            dark = dark.replace(on_light, on_dark)
        self._place(_TITLE)
        self._figure.patch.set_visible(True)
        self._figure.dpi = _DPI
        self.axes[0].set_title(drawing.plain(_shortened(title, 60)), size=9, parse_math=False)
        pixels = io.BytesIO()
        canvas = FigureCanvasAgg(self._figure)
        canvas.print_png(pixels, metadata={"Software": MARK})
        return Drawn(name, title, alt, caption, light, dark, pixels.getvalue())

    def _place(self, top: float) -> None:
        """Give the axes all but the margins. Layout engines of matplotlib take as long as a draw.

        Args:
            top: inches above them.
        """
        wide, high = self._figure.get_size_inches()
        left = _LEFT + (_LABEL if self.axes[0].get_ylabel() else 0.0)
        self._figure.subplots_adjust(
            left / wide, self._bottom / high, 1 - _RIGHT / wide, 1 - top / high
        )


def sheet(xlabel: str, ylabel: str = "") -> Sheet:
    """A sheet with one pair of axes, whose numbers are short: 10k for 10,000."""
    made = Sheet()
    axes = made.axes[0]
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return made


def _shortened(text: str, most: int) -> str:
    """A text with its middle left out where it is long."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
