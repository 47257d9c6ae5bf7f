"""`hpctrain status`: show the user's jobs, why they wait, and the progress of their runs."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from hpctrain.cli.argument_types import RUN
from hpctrain.cli.terminal import note, put
from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.jobs import job_facts, job_status, job_watching
from hpctrain.jobs.job_status import JobStatus

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Shows your jobs that wait or run, ended jobs that Slurm still lists, and the newest runs "
        "below ./runs. Of named jobs it also shows the log; if one waits, why, and what would "
        "start sooner; if one has failed, the cause and how to continue. "
        "Without Slurm, shows all runs below ./runs."
    )
    parser.add_argument("names", nargs="*", **RUN)
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument(
        "--used",
        action="store_true",
        help="also show what named jobs have used, and the options that would have been enough",
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    if arguments.used and not arguments.names:
        raise UsageError("HT804.used-without-job")
    slurm_error = None
    try:
        user_jobs = slurm.jobs(os.environ, uid=os.getuid())
    except slurm.NoAnswerError as error:
        slurm_error = str(error)
        sys.stderr.write(f"hpctrain: Slurm does not answer: {slurm_error}\n")
        statuses = job_status.without_slurm(arguments.names)
    else:
        statuses = _with_slurm(arguments.names, user_jobs)
    if arguments.json:
        jobs = [_as_json(status, arguments.used) for status in statuses]
        sys.stdout.write(json.dumps({"slurm_error": slurm_error, "jobs": jobs}) + "\n")
    elif statuses:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        rows = [job_watching.row_of(status) for status in statuses]
        put(job_watching.aligned([job_watching.HEADS, *rows], width))
        if arguments.names:
            _put_details(statuses, arguments.used)
    else:
        nothing = (
            "there are no runs below ./runs" if slurm_error else "Slurm lists no jobs of yours"
        )
        sys.stderr.write(f"hpctrain: {nothing}\n")
    return exit_codes.DONE


def _as_json(status: JobStatus, used: bool) -> dict[str, Any]:
    if not used:
        return job_status.as_json(status)
    return job_status.as_json(status, job_watching.use_of(status, os.environ).as_json())


def _put_details(statuses: Sequence[JobStatus], used: bool) -> None:
    for status in statuses:
        more = job_facts.waiting_lines(status.queued, os.environ) if status.queued else []
        if used:
            more += job_watching.use_of(status, os.environ).lines()
        if lines := job_watching.details(status, more):
            put(f"{f'job {status.label}' if status.label else status.run_dir}\n{lines}")


def _with_slurm(names: Sequence[str], user_jobs: Sequence[slurm.QueuedJob]) -> list[JobStatus]:
    """Return the status of the named jobs and runs; without names, of all jobs of the user."""
    if not names:
        statuses, older = job_status.listed(user_jobs, os.environ)
        if older:
            runs = f"{older} older run{'s' * (older > 1)} below ./runs"
            note(f"{runs}: hpctrain status RUN shows one")
        return statuses
    try:
        return [
            status for name in names for status in job_status.named(name, user_jobs, os.environ)
        ]
    except slurm.NoAnswerError as error:
        raise StartError("HT816.no-job-list", error=error) from None
