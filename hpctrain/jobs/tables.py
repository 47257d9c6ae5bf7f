"""Tables of jobs and of the progress of their runs, as plain text."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster import slurm
from hpctrain.jobs.run_progress import Progress, progress, run_of
from hpctrain.jobs.slurm_reasons import explained, plain

__all__ = ["HEADS", "aligned", "of_array", "place", "row_of_ended", "row_of_job", "row_of_run"]

HEADS = (
    *("JOB", "NAME", "STATE", "NODES", "RESTARTS", "USED", "LEFT"),
    *("STEP", "EPOCH", "LOSS", "SAMPLES/S", "RUN, OR WHY IT WAITS"),
)
_RIGHT = ("NODES", "RESTARTS", "USED", "LEFT", "STEP", "EPOCH", "LOSS", "SAMPLES/S")
_LONGEST_NAME = 32
_LONGEST_REASON = 500
_MOST_DIGITS = 10**9


def row_of_job(job: slurm.Job, env: Mapping[str, str], named: bool = True) -> tuple[str, ...]:
    """Return the row of a job, by `HEADS`; `named` is as in `run_of`."""
    waits = job.word == "PENDING"
    run = run_of(job, env, named)
    made = progress(run) if run else None
    nodes = job.nodes if waits or not job.hosts else f"{job.nodes} {plain(job.hosts)}"
    notes = [place(run)] if run else []
    if why := explained(job):
        notes.append(why)
    if waits and "T" in job.start:
        notes.append(f"start about {job.start.replace('T', ' ')}")
    return (
        *(job.label, _cut(plain(job.name), _LONGEST_NAME), plain(job.word).lower(), nodes),
        *(str(job.restarts or ""), "" if waits else job.used, "" if not job.lives else job.left),
        *_figures(made),
        "; ".join(notes),
    )


def row_of_run(path: Path, label: str) -> tuple[str, ...]:
    """Return the row of a run directory whose job is not in Slurm, by `HEADS`."""
    made = progress(path)
    state = made.status or "not ended" if made else "no run yet"
    why = _cut(plain(made.reason), _LONGEST_REASON) if made else ""
    notes = [place(path), *([why] if why else [])]
    state = _cut(plain(state), _LONGEST_NAME)
    return (label, "", state, *[""] * 4, *_figures(made), "; ".join(notes))


def row_of_ended(one: slurm.Ended, run: Path | None) -> tuple[str, ...]:
    """Return the row of a job that only Slurm's accounting has, by `HEADS`."""
    notes = [place(run)] if run else []
    notes += [f"exit code {one.code}"] if one.code else []
    figures = _figures(progress(run) if run else None)
    return (one.label, "", plain(one.word).lower(), *[""] * 4, *figures, "; ".join(notes))


def of_array(rows: Sequence[tuple[str, str, str, Path]]) -> list[tuple[str, ...]]:
    """Return a table of the tasks of an array: setting, state, last step and metrics of each.

    Args:
        rows: label, setting, state and run directory of each task.
    """
    made = [progress(path) for _, _, _, path in rows]
    names = list(dict.fromkeys(name for one in made if one for name in one.metrics))
    heads = [_cut(plain(name), _LONGEST_NAME).upper() for name in names]
    table = [("TASK", "SETTING", "STATE", "STEP", *heads)]
    for (label, setting, state, _), one in zip(rows, made, strict=True):
        step = "" if one is None or one.step is None else str(one.step)
        values = [_value(one.metrics.get(name)) if one else "" for name in names]
        table.append((label, plain(setting), plain(state).lower(), step, *values))
    return table


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return the rows in columns; the first row is the head. Empty columns are left out.

    Args:
        rows: rows of printable text.
        width: characters of a line; longer lines are cut. None for no limit.
    """
    used = [
        index for index in range(len(rows[0])) if any(row[index] for row in rows[1:]) or index == 0
    ]
    widths = {index: max(len(row[index]) for row in rows) for index in used}
    right = {index for index in used if rows[0][index] in _RIGHT}
    lines = []
    for row in rows:
        cells = [
            row[index].rjust(widths[index]) if index in right else row[index].ljust(widths[index])
            for index in used
        ]
        line = "  ".join(cells).rstrip()
        lines.append(_cut(line, width) if width else line)
    return "\n".join(lines) + "\n"


def _figures(made: Progress | None) -> tuple[str, str, str, str]:
    if made is None:
        return "", "", "", ""
    return (
        "" if made.step is None else str(made.step),
        "" if made.epoch is None else str(made.epoch + 1),
        _value(made.loss),
        _speed(made.speed),
    )


def _speed(value: float | None) -> str:
    whole = value is not None and abs(value) < _MOST_DIGITS
    return f"{value:.0f}" if whole else _value(value)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else _cut(plain(str(value)), _LONGEST_NAME)


def place(path: Path) -> str:
    """Return a path, relative to the current folder if it is below."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the current folder was removed
        return plain(str(path))
    text = os.path.normpath(os.path.join(here, path))
    return plain(os.path.relpath(text, here) if text.startswith(here + os.sep) else text)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
