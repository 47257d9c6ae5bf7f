"""HTML page of a report: collects its content and renders it with an escaping template."""

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from hpctrain._version import __version__
from hpctrain.monitoring.report import comparison, curves, figures, steps, tables, wording
from hpctrain.monitoring.report.figures import Drawn
from hpctrain.monitoring.report.run_reader import RecordedRun
from hpctrain.monitoring.report.tables import Table

__all__ = ["Section", "render", "sections"]

_BEST = ("top1", "top5")  # higher is better
_MOST_OF_RANKS = 8  # figures, one per run


@dataclass(slots=True)
class Section:
    """Section of the page: figures and tables under a heading.

    Attributes:
        id: HTML id of the heading.
        title: text of the heading.
        text: text below the heading, or empty.
        figures, tables: figures and tables, in this order.
    """

    id: str
    title: str
    text: str = ""
    figures: list[Drawn] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def sections(runs: Sequence[RecordedRun]) -> list[Section]:
    """Draw all figures of a report and return the sections with them."""
    with figures.sketching():
        drawn, more = curves.draw_all(runs)
        text = "" if drawn else "No row of metrics has been written so far."
        if more:
            text = f"{wording.number(more)} more metrics are in metrics.jsonl."
        over_steps = Section("curves", "Curves", text, drawn)
        time_of_steps = Section("steps", "Time of a step")
        figure = steps.draw_times(runs)
        time_of_steps.figures += [figure] if figure else []
        for number, run in enumerate(runs[:_MOST_OF_RANKS]):
            figure = steps.draw_ranks(run, number, len(runs) == 1)
            time_of_steps.figures += [figure] if figure else []
        if len(runs) == 1 and (found := tables.ranks(runs[0])):
            time_of_steps.tables.append(found)
    return [over_steps, time_of_steps]


def render(runs: Sequence[RecordedRun], shown: Sequence[Section]) -> str:
    """Return the page in ASCII, so that names of runs cause no encoding errors.

    Args:
        runs: runs of the report.
        shown: sections with the figures.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data"] = _data
    now = time.time()
    context: dict[str, Any] = {
        "mark": figures.MARK,
        "palette": figures.PALETTE,
        "title": _title(runs),
        "version": __version__,
        "written": wording.moment(now),
        "notes": [note for run in runs for note in _notes(run, now)],
        "runs": [
            {
                "label": run.label,
                "path": wording.text(str(run.path)),
                "hue": number % len(figures.PALETTE),
            }
            for number, run in enumerate(runs)
        ],
        "figures": shown,
        "starts": [_starts(run, len(runs) == 1) for run in runs if run.starts],
    }
    if len(runs) == 1:
        context |= {
            "tiles": _tiles(runs[0]),
            "metrics": tables.metrics(runs[0]),
            "system": tables.system(runs[0]),
            "options": tables.options(runs[0]),
        }
    else:
        context |= {
            "results": comparison.results(runs),
            "comparison": comparison.compare(runs),
        }
    page = environment.get_template("page.html").render(context)
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _data(image: str) -> str:
    """Return an SVG as a data address; a browser runs no scripts of an SVG in an image."""
    return "data:image/svg+xml;base64," + base64.b64encode(image.encode(errors="replace")).decode()


def _title(runs: Sequence[RecordedRun]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    name = runs[0].identity.get("name")
    return f"{wording.text(name)}: {runs[0].label}" if name else runs[0].label


def _tiles(run: RecordedRun) -> dict[str, str]:
    """Return the summary: status, best accuracy if it was measured, then the rest."""
    finite = {name: run.series[name].finite()[1] for name in _BEST if name in run.series}
    best = {f"best {k}": wording.number(float(v.max())) for k, v in finite.items() if len(v)}
    found = tables.summary(run)
    return {"status": found.pop("status"), **best, **found}


def _notes(run: RecordedRun, now: float) -> list[str]:
    """Return notes for the top of the page, about unreadable files or an unfinished run."""
    notes = [f"{run.label}: {wording.text(error.found)}" for error in run.unread.values()]
    if not run.summary and not run.end_unread:
        last = wording.moment(run.last.get("time"))
        ago = wording.duration(now - run.last["time"]) if last != "–" else ""
        notes.append(
            f"{run.label} has not ended: it is still training, or was killed. Its last row is "
            + (f"of {last}, {ago} before this page was written." if ago else "not written yet.")
        )
    partial = [name for name, s in run.series.items() if len(s.finite()[1]) < len(s.values)]
    if partial:
        named = ", ".join(wording.text(name) for name in partial[:5])
        notes.append(f"{run.label}: some values of {named} are not finite.")
    return notes


def _starts(run: RecordedRun, alone: bool) -> Table:
    found = tables.starts(run)
    if alone:
        return found
    return Table(f"Starts of {run.label}", found.heads, found.rows, note=found.note)
