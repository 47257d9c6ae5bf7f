"""Curves of a run in progress, redrawn in place, and of several runs in one figure."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.monitoring import drawing

__all__ = ["curves", "follow", "png"]

_MOST_PANELS = 6

Rows = Sequence[Mapping[str, Any]]


def png(rows: Rows, title: str) -> bytes:
    """Return a figure of the metrics as a PNG: the first panels of a report.

    Args:
        rows: rows of metrics.jsonl.
        title: text above the figure; any characters.

    Raises:
        UsageError: matplotlib is not installed.
    """
    drawing.need("notebook", "matplotlib.figure")
    from hpctrain.monitoring import figures
    from hpctrain.monitoring.curves import History, collect, panels

    series, _ = collect(rows)
    return figures.png(panels([History(title, series, [])])[:_MOST_PANELS], title)


def curves(run: str | os.PathLike[str], *others: str | os.PathLike[str]) -> bytes:
    """Return one figure of several runs as a PNG: a curve for each run, a panel for each metric.

    `IPython.display.Image` shows it in a notebook. The panels are the first six of a report. The
    runs may have been started by any launcher, and may go on.

    Args:
        run: run directory.
        others: run directories to compare with.

    Raises:
        UsageError: matplotlib is not installed, or there is no run in a folder.
    """
    drawing.need("notebook", "matplotlib.figure")
    from hpctrain.monitoring import figures
    from hpctrain.monitoring.curves import panels
    from hpctrain.monitoring.report import run_reader

    runs = run_reader.read([os.fspath(path) for path in (run, *others)])
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].label
    return figures.png(panels(runs)[:_MOST_PANELS], title)


def follow(
    title: str,
    rows: Callable[[], Rows],
    states: Iterable[str],
    path: Path,
) -> Path | None:
    """Draw until a job has ended: in a notebook in one place, else into a file.

    Args:
        title: title of the job.
        rows: function that returns the rows logged so far.
        states: states of the job, one from time to time until it has ended.
        path: path of the file.

    Returns:
        The file; None in a notebook.

    Raises:
        UsageError: matplotlib is not installed.
    """
    in_notebook = _in_notebook()
    drawn: tuple[int, str] | None = None
    with contextlib.suppress(KeyboardInterrupt):  # the job continues
        for state in states:
            logged = rows()  # after the state: a job that has ended logs nothing more
            if drawn != (len(logged), state):
                image = png(logged, f"{title}, {state}")
                if in_notebook:
                    from IPython import display

                    # Its type hints lack the classes and functions of a notebook.
                    ways: Any = display
                    ways.display(ways.Image(image), display_id=title, update=drawn is not None)
                else:
                    path.write_bytes(image)
                    sys.stderr.write(f"{path}: {_values(logged) or 'nothing logged so far'}\n")
                drawn = len(logged), state
    return None if in_notebook else path


def _in_notebook() -> bool:
    python = sys.modules.get("IPython")
    return python is not None and hasattr(python.get_ipython(), "kernel")


def _values(rows: Rows) -> str:
    """Return the names and values of the last row as readable text."""
    return ", ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in (rows[-1] if rows else {}).items()
        if name != "time"
    )
