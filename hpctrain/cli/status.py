"""`hpctrain status`: show the user's jobs, why they wait, and the progress of their runs."""

import argparse
import os
import shutil
import sys
from typing import Any

from hpctrain import rundir
from hpctrain.cli.terminal import put
from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import lookup, run_progress, tables

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "status",
        help="show your jobs, why they wait, and the progress of their runs",
        description="Shows your jobs that wait or run, and ended jobs that Slurm still lists. "
        "Without Slurm, shows the runs below ./runs.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="RUN", help="job number, run directory, or job name"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    try:
        mine = slurm.jobs(os.environ, uid=os.getuid())
    except slurm.NoAnswerError as error:
        sys.stderr.write(f"hpctrain: Slurm does not answer: {error}\n")
        return _without_slurm(arguments.words)
    if not arguments.words:
        rows = [tables.row_of_job(job, os.environ, named=False) for job in mine]
        _show(rows, "you have no jobs, and Slurm remembers none that has ended")
        return rundir.DONE
    try:
        rows = [row for word in arguments.words for row in _rows(word, mine)]
    except slurm.NoAnswerError as error:
        raise StartError("HT816", f"Slurm does not answer: {error}", "an answer") from None
    _show(rows, "")
    return rundir.DONE


def _rows(word: str, mine: list[slurm.Job]) -> list[tuple[str, ...]]:
    """Return the rows of the jobs or the run that a word names."""
    try:
        one = lookup.named(word, mine, os.environ)
    except UsageError:
        if ended := _accounted(word):
            return [tables.row_of_ended(job, None) for job in ended]
        raise
    if one.jobs or one.run_dir is None:
        return [tables.row_of_job(job, os.environ) for job in one.jobs]
    ended = _accounted(one.label)
    if len(ended) == 1:
        return [tables.row_of_ended(ended[0], one.run_dir)]
    return [tables.row_of_run(one.run_dir, one.label)]


def _accounted(label: str) -> list[slurm.Ended]:
    """Return an ended job from Slurm's accounting, if it is listed there."""
    try:
        return slurm.ended(label, os.environ) if slurm.is_label(label) else []
    except slurm.NoAnswerError:
        return []


def _without_slurm(words: list[str]) -> int:
    """Show the runs from their run directories only."""
    if words:
        runs = [lookup.named(word, (), os.environ).run_dir for word in words]
        paths = [run for run in runs if run is not None]
    else:
        paths = [path for path in lookup.runs() if not path.name.startswith(".")]
    rows = [tables.row_of_run(path, run_progress.label_of(path)) for path in paths]
    _show(rows, "and there are no runs below ./runs")
    return rundir.DONE


def _show(rows: list[tuple[str, ...]], nothing: str) -> None:
    if not rows:
        sys.stderr.write(f"hpctrain: {nothing}\n")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    put(tables.aligned([tables.HEADS, *rows], width))
