"""HTML page of a report: draws the figures, and renders all with an escaping template."""

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from hpctrain._version import __version__
from hpctrain.monitoring import curves, figures
from hpctrain.monitoring.curves import Panel
from hpctrain.monitoring.report import step_figures, tables, wording
from hpctrain.monitoring.report.run_reader import RecordedRun

__all__ = ["MARK", "render"]

# Mark of a page that distinguishes it from other files.
MARK = "written by hpctrain report"
_MOST_PANELS = 24
_MOST_OF_RANKS = 8  # figures, one per run


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure on the page.

    Attributes:
        image: SVG as an address; a browser runs no scripts of an SVG in an image.
        alt: text for screen readers.
        caption: text below the figure.
    """

    image: str
    alt: str
    caption: str


def render(runs: Sequence[RecordedRun]) -> str:
    """Return the page in ASCII, so that names of runs cause no encoding errors."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["text"] = lambda path: wording.text(str(path))
    now = time.time()
    panels = curves.panels(runs)
    with figures.style():
        over_steps = [_of_panel(panel) for panel in panels[:_MOST_PANELS]]
        of_steps = list(_of_steps(runs))
    page = environment.get_template("page.html").render(
        mark=MARK,
        palette=figures.PALETTE,
        title=_title(runs),
        version=__version__,
        written=wording.moment(now),
        notes=[note for run in runs for note in _notes(run, now)],
        runs=runs,
        summary=tables.side_by_side("Results", runs, tables.summary, sort=False),
        metrics=tables.metrics(runs),
        panels=over_steps,
        left_out=max(len(panels) - _MOST_PANELS, 0),
        steps=of_steps,
        starts=tables.starts(runs),
        system=tables.side_by_side("System", runs, tables.system),
        options=tables.side_by_side("Options", runs, tables.options),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _title(runs: Sequence[RecordedRun]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    name = runs[0].identity.get("name")
    return f"{wording.text(name)}: {runs[0].label}" if name else runs[0].label


def _notes(run: RecordedRun, now: float) -> Iterator[str]:
    """Yield notes for the top of the page, about an unfinished run and odd numbers."""
    if not run.summary:
        last, end = wording.moment(run.last.get("time")), "not written yet."
        if last != wording.NOTHING:
            ago = wording.duration(now - run.last["time"])
            end = f"of {last}, {ago} before this page was written."
        yield (
            f"{run.label} has not ended: it is still training, or was killed. Its last row is {end}"
        )
    partial = [name for name, s in run.series.items() if len(s.finite()[1]) < len(s.values)]
    if partial:
        named = ", ".join(wording.text(name) for name in partial[:5])
        yield f"{run.label}: some values of {named} are not finite."


def _shown(drawn: Figure, alt: str, caption: str) -> Shown:
    code = base64.b64encode(figures.svg(drawn).encode(errors="replace")).decode()
    return Shown(f"data:image/svg+xml;base64,{code}", alt, caption)


def _of_panel(panel: Panel) -> Shown:
    drawn = figures.figure(legend_lines=len(panel.curves))
    figures.draw(drawn, panel)
    labels = ", ".join(wording.text(curve.label) for curve in panel.curves)
    return _shown(drawn, f"{figures.title_of(panel)} over steps: {labels}.", _caption(panel))


def _caption(panel: Panel) -> str:
    """Return the explanation of the marks in a figure."""
    sentences = []
    if (most := max(curve.per_point for curve in panel.curves)) > 1:
        sentences.append(f"Line: the median of every {most:,} rows; area: their lowest to highest.")
    if any(len(curve.missing) for curve in panel.curves):
        sentences.append("Crosses: values that are not finite.")
    steps = sorted({step for curve in panel.curves for step in curve.restarts})
    if steps:
        named = ", ".join(map(wording.number, steps[:5])) + (", …" if len(steps) > 5 else "")
        sentences.append(f"Dotted: training continued after a restart at step {named}.")
    return " ".join(sentences)


def _of_steps(runs: Sequence[RecordedRun]) -> Iterator[Shown]:
    """Yield the figures of step times, and of the ranks of each run."""
    if any(run.timings.buckets for run in runs):
        drawn, text = step_figures.draw_times(runs)
        yield _shown(drawn, f"Histogram of the times of a step. {text}", text)
    for run in runs[:_MOST_OF_RANKS]:
        if len(run.timings.hosts) > 1:
            drawn, text = step_figures.draw_ranks(run)
            alt = f"Times of the {len(run.timings.hosts)} ranks of {run.label}. {text}"
            yield _shown(drawn, alt, text)
