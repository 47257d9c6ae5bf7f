"""Tables of jobs and of the progress of their runs, as plain text."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable, shortened
from hpctrain.errors import UsageError
from hpctrain.jobs.failures import in_words
from hpctrain.jobs.job_status import JobStatus
from hpctrain.jobs.pending import since
from hpctrain.jobs.run_progress import Progress
from hpctrain.jobs.slurm_reasons import notes

__all__ = ["HEADS", "RIGHT", "aligned", "details", "place", "row_of"]

HEADS = (
    *("JOB", "NAME", "STATE", "NODES", "RESTARTS", "USED", "LEFT"),
    *("STEP", "EPOCH", "LOSS", "SAMPLES/S", "RUN, OR WHY IT WAITS"),
)
#: Columns of numbers.
RIGHT = ("NODES", "RESTARTS", "USED", "LEFT", "STEP", "EPOCH", "LOSS", "SAMPLES/S")
_LONGEST_NAME = 32
_REFUSED = UsageError.exit_code
_LONGEST_REASON = 500


def row_of(status: JobStatus) -> tuple[str, ...]:
    """Return the row of a job or a run, by `HEADS`."""
    run = rundir.RunDirectory(status.run_dir).current().path if status.run_dir else None
    other = f", which has the run of job {status.owner}" if status.owner else ""
    texts = [f"{place(run)}{other}"] if run else []
    figures = _figures(status.progress)
    if status.queued is not None:
        cells, text = _queued(status.queued)
        return (status.label, *cells, *figures, "; ".join([*texts, *text]))
    if status.ended is not None:
        state = in_words(status.ended.state, status.ended.code)
        texts += [f"exit code {status.ended.code}"] if status.ended.code else []
    else:
        state = shortened(printable(status.run_status), _LONGEST_NAME)
        reason = status.progress.reason if status.progress else ""
        texts += [shortened(printable(reason), _LONGEST_REASON)] if reason else []
    # The default run directory is NAME-LABEL.
    name, _, label = status.run_dir.name.rpartition("-") if status.run_dir else ("", "", "")
    name = shortened(printable(name), _LONGEST_NAME) if label == status.label else ""
    return (status.label, name, state, *[""] * 4, *figures, "; ".join(texts))


def _queued(job: slurm.QueuedJob) -> tuple[tuple[str, ...], list[str]]:
    """Return the cells from NAME to LEFT, and the texts of the last cell."""
    waits = job.state == "PENDING"
    texts = [text] if (text := notes(job)) else []
    if waits:
        texts += [text for text in [since(job)] if text]
        texts += [f"after {printable(job.dependency)}"] if job.dependency else []
        texts += [f"expected start {job.start.replace('T', ' ')}"] if "T" in job.start else []
    return (
        shortened(printable(job.name), _LONGEST_NAME),
        in_words(job.state, job.code),
        f"{job.nodes or ''} {'' if waits else printable(job.hosts)}".strip(),
        str(job.restarts or ""),
        "" if waits else job.used,
        job.left if job.active else "",
    ), texts


def details(status: JobStatus, more: Sequence[tuple[str, str]] = ()) -> str:
    """Return lines about a job that need more space than a row, such as cause, time and log.

    Args:
        status: status of the job.
        more: lines about its wait, or about what it has used, each with its name.
    """
    lines = [*more, *([("cause:", status.failure)] if status.failure else [])]
    lines += [("stopped:", status.stop)] if status.stop else []
    if status.progress is not None and status.progress.effective is not None:
        lines.append(("time:", str(status.progress.effective)))
    if status.run_dir is not None and not status.owner:
        from hpctrain.jobs.changes import since_previous  # for named jobs only

        lines += [("changed:", text)] if (text := since_previous(status.run_dir)) else []
    if status.log is not None and os.path.exists(status.log):
        lines.append(("log:", place(status.log)))
    # A job that was refused there would be refused again.
    refused = status.queued is not None and status.owner and status.queued.code == _REFUSED
    ended = (status.failed or status.stopped) and not refused
    if ended and status.run_dir is not None and _has_checkpoints(status.run_dir):
        again = f"--run-dir {shlex.quote(place(status.run_dir))} -- … --resume"
        ways = [f"hpctrain submit … {again} (with other code or options)"]
        if status.queued is not None:
            ways.insert(0, f"hpctrain requeue {status.label}")
        lines += zip(("continue:", "or:"), ways, strict=False)
    return "".join(f"  {name:9} {text}\n" for name, text in lines)


def _has_checkpoints(run: Path) -> bool:
    try:
        return rundir.RunDirectory(run).furthest() is not None
    except OSError:  # the run of another user
        return False


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return the rows in columns; the first row is the head. Empty columns are left out.

    Args:
        rows: rows of printable text.
        width: characters of a line; longer lines are cut. None for no limit.
    """
    columns = []
    for number, (head, *cells) in enumerate(zip(*rows, strict=True)):
        if number == 0 or any(cells):
            align = str.rjust if head in RIGHT else str.ljust
            widest = max(map(len, (head, *cells)))
            columns.append([align(cell, widest) for cell in (head, *cells)])
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return "".join(f"{shortened(line, width or len(line))}\n" for line in lines)


def _figures(run: Progress | None) -> tuple[str, str, str, str]:
    """Return the cells from STEP to SAMPLES/S; unknown values are empty."""
    run = run or Progress()
    return (
        "" if run.step is None else str(run.step),
        "" if run.epoch is None else str(run.epoch + 1),
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.speed is None else f"{run.speed:.0f}",
    )


def place(path: Path) -> str:
    """Return a path, relative to the current folder if it is below."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # the current folder was removed
        return printable(path)
    text = os.path.normpath(os.path.join(folder, path))
    return printable(os.path.relpath(text, folder) if text.startswith(folder + os.sep) else text)
