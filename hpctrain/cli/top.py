"""`hpctrain top`: a live screen of the user's jobs and runs, drawn by rich."""

import argparse
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from hpctrain.cluster import slurm
from hpctrain.cluster.slurm.shared_jobs import SharedJobs
from hpctrain.errors import UsageError, exit_codes
from hpctrain.jobs import job_status, job_watching
from hpctrain.jobs.job_status import JobStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add"]

_SECONDS_BETWEEN_QUERIES = 5.0
_ALWAYS = ("JOB", "NAME", "STATE", "STEP", "LOSS")
_WIDE, _COLUMNS_FOR_WIDE = (*_ALWAYS[:3], "USED", *_ALWAYS[3:], "SAMPLES/S"), 110
_PLACE = job_watching.HEADS[-1]
_SHARES = {"NAME": 1, _PLACE: 2}  # of the width that the other columns leave
_WIDTH_OF_BAR = 10
_COLOURS = {
    **dict.fromkeys(("running", "not ended"), "green"),
    **dict.fromkeys(("pending", "stopped", "requeued", "suspended"), "yellow"),
    **dict.fromkeys(("done", "completed", "completing"), "cyan"),
    **dict.fromkeys(("cancelled", "no run yet"), "dim"),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Shows the jobs and runs of `hpctrain status`: those that run, those that wait, and the "
        "others, the newest of each first. Each run has a bar, the time "
        "to its end (ETA) and the part that is done. Refreshes every five seconds. Ctrl-C quits."
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    del arguments
    if not sys.stdout.isatty():
        raise UsageError("HT804.not-a-terminal")
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise UsageError("HT651.rich-missing", error=error) from None
    # They may be ignored here: by nohup, cron and some CI.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    console, shared, scripts = Console(), SharedJobs(os.environ), dict[str, str]()
    try:
        with Live("asking Slurm …", console=console, screen=True, auto_refresh=False) as live:
            while True:
                statuses, note = _query(shared, scripts)
                live.update(_picture(statuses, note, console.width), refresh=True)
                time.sleep(_SECONDS_BETWEEN_QUERIES)
    except KeyboardInterrupt:
        return exit_codes.DONE


def _query(shared: SharedJobs, scripts: dict[str, str]) -> tuple[list[JobStatus], str]:
    """Return the jobs and then the other runs, in the order of the screen; a note for the user."""
    note, jobs = "", None
    try:
        jobs = shared.look().jobs
    except slurm.NoAnswerError as error:
        note = f"Slurm does not answer: {error}"
    statuses, older = job_status.listed(jobs, os.environ, scripts)
    if older:
        note = note or f"{older} older run{'s' * (older > 1)} below ./runs"
    statuses.reverse()
    return sorted(statuses, key=_place), note


def _place(status: JobStatus) -> int:
    """Return the group of a job or run on the screen: running, waiting, ended, without a job."""
    if status.queued is None:
        return 3
    return 2 if not status.queued.active else int(status.queued.state == "PENDING")


def _picture(statuses: list[JobStatus], note: str, width: int) -> "RenderableType":
    """Return the screen for a terminal of some columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    wide = _WIDE if width >= _COLUMNS_FOR_WIDE else _ALWAYS
    rows = [
        dict(zip(job_watching.HEADS, job_watching.row_of(one), strict=True)) for one in statuses
    ]
    heads = [head for head in wide if any(row[head] for row in rows)]
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold")
    for head in [*heads, "PROGRESS", "", _PLACE]:
        table.add_column(
            head,
            justify="right" if head in job_watching.RIGHT else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=_SHARES.get(head),
            min_width=len(head),
        )
    for status, row in zip(statuses, rows, strict=True):
        cells = [Text(row[head], _COLOURS.get(row[head], "red") if head == "STATE" else "")
                 for head in heads]  # fmt: skip
        table.add_row(*cells, *_progress(status), Text(row[_PLACE]))
    nothing = "" if rows else "there are no jobs of yours, and no runs below ./runs"
    return Group(table, Text(nothing), Text(note, style="dim"))


def _progress(status: JobStatus) -> tuple[Any, str]:
    """Return the bar of a run, and its ETA with the part that is done; empty if unknown."""
    from rich.progress_bar import ProgressBar

    run, job = status.progress, status.queued
    if run is None or not run.end or run.step is None:
        return "", ""
    bar = ProgressBar(run.end, run.step, _WIDTH_OF_BAR, finished_style="bar.complete")
    trains = status.run_status == "not ended" and (job is None or job.state == "RUNNING")
    eta = f"ETA {_clock(run.left)}; " if trains else ""
    return bar, f"{eta}{100 * min(run.step / run.end, 1):.0f} %"


def _clock(seconds: float | None) -> str:
    """Return a time as 0:08 or 1:02:03; ? if it is unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
