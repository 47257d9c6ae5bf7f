"""`hpctrain status`: show the user's jobs, why they wait, and the progress of their runs."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence

from hpctrain.cli.terminal import put
from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.jobs import job_status, job_tables, lookup, run_progress
from hpctrain.jobs.job_status import JobStatus

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Shows your jobs that wait or run, and ended jobs that Slurm still lists. Of named jobs it "
        "also shows the log, and if one has failed, the cause and how to continue. "
        "Without Slurm, shows the runs below ./runs."
    )
    parser.add_argument(
        "names", nargs="*", metavar="RUN", help="job number, run directory, or job name"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    slurm_error = None
    try:
        user_jobs = slurm.jobs(os.environ, uid=os.getuid())
    except slurm.NoAnswerError as error:
        slurm_error = str(error)
        sys.stderr.write(f"hpctrain: Slurm does not answer: {error}\n")
        statuses = _without_slurm(arguments.names)
    else:
        statuses = _with_slurm(arguments.names, user_jobs)
    if arguments.json:
        jobs = [job_status.as_json(status) for status in statuses]
        sys.stdout.write(json.dumps({"slurm_error": slurm_error, "jobs": jobs}) + "\n")
    elif statuses:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        rows = [job_tables.row_of(status) for status in statuses]
        put(job_tables.aligned([job_tables.HEADS, *rows], width))
        if arguments.names:
            _put_details(statuses)
    else:
        nothing = (
            "there are no runs below ./runs" if slurm_error else "Slurm lists no jobs of yours"
        )
        sys.stderr.write(f"hpctrain: {nothing}\n")
    return exit_codes.DONE


def _put_details(statuses: Sequence[JobStatus]) -> None:
    for status in statuses:
        if lines := job_tables.details(status):
            put(f"{f'job {status.label}' if status.label else status.run_dir}\n{lines}")


def _with_slurm(names: Sequence[str], user_jobs: Sequence[slurm.QueuedJob]) -> list[JobStatus]:
    """Return the status of the named jobs and runs; without names, of all jobs of the user."""
    if not names:
        return [job_status.of_queued(job, os.environ, named=False) for job in user_jobs]
    try:
        return [status for name in names for status in _named(name, user_jobs)]
    except slurm.NoAnswerError as error:
        raise StartError("HT816", f"Slurm does not answer: {error}", "an answer") from None


def _named(name: str, user_jobs: Sequence[slurm.QueuedJob]) -> list[JobStatus]:
    """Return the status of the jobs or the run with a name."""
    try:
        named = lookup.find(name, user_jobs, os.environ)
    except UsageError:
        if ended := _accounted(name):
            return [job_status.of_ended(job, None) for job in ended]
        raise
    if named.jobs or named.run_dir is None:
        return [job_status.of_queued(job, os.environ) for job in named.jobs]
    ended = _accounted(named.label)
    if len(ended) == 1:
        return [job_status.of_ended(ended[0], named.run_dir)]
    return [job_status.of_run(named.run_dir, named.label)]


def _accounted(label: str) -> list[slurm.Ended]:
    """Return an ended job from Slurm's accounting, if it is listed there."""
    try:
        return slurm.ended(label, os.environ) if slurm.is_label(label) else []
    except slurm.NoAnswerError:
        return []


def _without_slurm(names: Sequence[str]) -> list[JobStatus]:
    """Return the status of the named runs, or of all below ./runs, from their directories only."""
    if names:
        runs = [lookup.find(name, (), os.environ).run_dir for name in names]
        paths = [run for run in runs if run is not None]
    else:
        paths = [path for path in lookup.runs() if not path.name.startswith(".")]
    return [job_status.of_run(path, run_progress.label_of(path)) for path in paths]
