"""Curves of a run in progress, redrawn in place, and of several runs in one figure."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.monitoring import drawing

__all__ = ["compare", "follow", "png"]

_SECONDS = 2.0
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
    from hpctrain.monitoring import curves, figures

    series, _ = curves.collect(rows)
    run = curves.History(title, series, [])
    return figures.png(curves.panels([run])[:_MOST_PANELS], title)


def compare(paths: Sequence[str | os.PathLike[str]]) -> bytes:
    """Return a figure of runs as a PNG; see `hpctrain.jobs.curves`.

    Args:
        paths: run directories.

    Raises:
        UsageError: matplotlib is not installed, or there is no run in a path.
    """
    drawing.need("notebook", "matplotlib.figure")
    from hpctrain.monitoring import curves, figures
    from hpctrain.monitoring.report import run_reader

    runs = run_reader.read([os.fspath(path) for path in paths])
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].label
    return figures.png(curves.panels(runs)[:_MOST_PANELS], title)


def follow(
    title: str,
    rows: Callable[[], Rows],
    wait: Callable[[float], tuple[str, bool]],
    path: Path,
) -> Path | None:
    """Draw until a job has ended: in a notebook in one place, else into a file.

    Args:
        title: title of the job.
        rows: function that returns the rows logged so far.
        wait: function that waits for a number of seconds, or until the job has ended; it returns
            the state, and whether the job has ended.
        path: path of the file.

    Returns:
        The file; None in a notebook.

    Raises:
        UsageError: matplotlib is not installed.
    """
    in_notebook = _in_notebook()
    drawn: tuple[int, str] | None = None
    ended, seconds = False, 0.0
    with contextlib.suppress(KeyboardInterrupt):  # the job continues
        while not ended:
            state, ended = wait(seconds)
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
            seconds = _SECONDS
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
