"""Curves of a run in progress: one figure, redrawn in place."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.monitoring import drawing

__all__ = ["follow", "last_values", "png"]

_SECONDS = 2.0
_MOST_PANELS = 6

Rows = Sequence[Mapping[str, Any]]


def last_values(rows: Rows) -> list[str]:
    """Return the names and values of the last row as readable text."""
    last = rows[-1] if rows else {}
    return [
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in last.items()
        if name != "time"
    ]


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
    notebook = _notebook()
    drawn: tuple[int, str] | None = None
    ended, seconds = False, 0.0
    with contextlib.suppress(KeyboardInterrupt):  # the job continues
        while not ended:
            state, ended = wait(seconds)
            logged = rows()  # after the state: a job that has ended logs nothing more
            if drawn != (len(logged), state):
                image = png(logged, f"{title}, {state}")
                if notebook is not None:
                    notebook(image)
                else:
                    path.write_bytes(image)
                    values = ", ".join(last_values(logged)) or "nothing logged so far"
                    sys.stderr.write(f"{path}: {values}\n")
                drawn = len(logged), state
            seconds = _SECONDS
    return None if notebook else path


def _notebook() -> Callable[[bytes], None] | None:
    """Return a function that redraws an image in the running cell; None outside of a notebook."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython import display

    # IPython has no type hints.
    image_of: Any = display.Image
    place: Any = display.DisplayHandle()  # type: ignore[no-untyped-call]
    show: Any = place.display

    def draw(image: bytes) -> None:
        nonlocal show
        show(image_of(image))
        show = place.update

    return draw
