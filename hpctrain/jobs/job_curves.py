"""Curves of a run in progress: one figure, redrawn in place."""

import contextlib
import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.cluster.texts import printable
from hpctrain.monitoring import drawing

__all__ = ["follow", "last_values", "panels", "png"]

_SECONDS = 2.0
_MOST_POINTS = 2000
_OTHERS = 4  # panels for values other than losses and accuracies

# Arguments: a figure as PNG, and the rows that it shows.
Show = Callable[[bytes, Sequence[Mapping[str, Any]]], None]
Curve = tuple[list[int], list[float]]


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Group curves into panels: by title, the curves by name, each as steps and values.

    Args:
        rows: rows of metrics.jsonl.
    """
    curves: dict[str, Curve] = {}
    for row in rows:
        for name, value in row.items():
            number = drawing.is_number(value) and name not in drawing.HEADS
            if number and isinstance(row.get("step"), int):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(float(value) if math.isfinite(value) else math.nan)
    drawn: dict[str, dict[str, Curve]] = {}
    for name, (steps, values) in curves.items():
        every = -(-len(steps) // _MOST_POINTS)
        drawn.setdefault(drawing.panel_of(name), {})[name] = (steps[::every], values[::every])
    first = [title for title in ("loss", "accuracy") if title in drawn]
    others = [title for title in drawn if title not in first][:_OTHERS]
    return {title: drawn[title] for title in (*first, *others)}


def last_values(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names and values of the last row as readable text."""
    last = rows[-1] if rows else {}
    return [
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in last.items()
        if name != "time"
    ]


def png(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Return a figure of all panels as a PNG.

    Args:
        rows: rows of metrics.jsonl.
        title: text above the figure; any characters.

    Raises:
        UsageError: matplotlib is not installed.
    """
    drawing.need("notebook", "matplotlib.figure")
    from matplotlib.figure import Figure

    drawn = panels(rows)
    # Without pyplot, which would choose a backend for the whole process.
    figure = Figure(figsize=(4.5 * max(len(drawn), 1), 3.2), layout="constrained")
    # parse_math=False: a $ in a name stays a $.
    figure.suptitle(printable(title), parse_math=False)
    for place, (name, curves) in enumerate(drawn.items(), 1):
        axes = figure.add_subplot(1, len(drawn), place)
        for steps, values in curves.values():
            axes.plot(steps, values, marker="." if len(steps) < 50 else "")
        axes.set_xlabel("step")
        axes.set_title(printable(name), parse_math=False)
        if list(curves) != [name]:
            drawing.legend(axes, axes.get_lines(), curves, fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def follow(
    title: str,
    rows: Callable[[], Sequence[Mapping[str, Any]]],
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
    show = notebook or _file(path)
    drawn: tuple[int, str] | None = None
    seconds = 0.0
    with contextlib.suppress(KeyboardInterrupt):  # the job continues
        while True:
            state, ended = wait(seconds)
            logged = rows()  # after the state: a job that has ended logs nothing more
            if drawn != (len(logged), state):
                show(png(logged, f"{title}, {state}"), logged)
                drawn = len(logged), state
            if ended:
                break
            seconds = _SECONDS
    return None if notebook else path


def _notebook() -> Show | None:
    """Return a function that redraws a figure in the running cell; None outside of a notebook."""
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython import display

    place: Any = None
    # IPython has no type hints.
    image_of: Any = display.Image
    first: Any = display.display

    def show(image: bytes, rows: Sequence[Mapping[str, Any]]) -> None:
        nonlocal place
        del rows
        if place is None:
            place = first(image_of(image), display_id=True)
        else:
            place.update(image_of(image))

    return show


def _file(path: Path) -> Show:
    """Return a function that writes a figure to the file, and prints the last values."""

    def show(image: bytes, rows: Sequence[Mapping[str, Any]]) -> None:
        path.write_bytes(image)
        sys.stderr.write(f"{path}: {', '.join(last_values(rows)) or 'nothing logged so far'}\n")

    return show
