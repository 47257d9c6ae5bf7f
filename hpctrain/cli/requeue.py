"""`hpctrain requeue`: start jobs again, with the same number and run directory."""

import argparse
import os

from hpctrain.cli.argument_types import RUN
from hpctrain.cli.terminal import put
from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.jobs import job_status
from hpctrain.jobs.job_facts import explained

__all__ = ["add"]

# States of array tasks that are started again only if the task itself is named.
_LEFT_ALONE = ("PENDING", "COMPLETED", "CANCELLED")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "The job keeps its number and continues in the same run directory. A running "
        "job is ended first, and the steps after its last checkpoint are repeated. For a job "
        "array, requeues the tasks that run or have failed."
    )
    parser.add_argument("names", nargs="+", **RUN)
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    targets = job_status.own_jobs(arguments.names, os.environ)
    # Check all jobs before requeueing the first.
    for job in [job for named in targets for job in _chosen(named)]:
        _requeue(job)
    return exit_codes.DONE


def _chosen(named: job_status.Named) -> list[slurm.QueuedJob]:
    """Return the job itself; for an array, the tasks that run and those that failed."""
    chosen = [job for job in named.jobs if job.label == named.label]
    chosen = chosen or [job for job in named.jobs if job.state not in _LEFT_ALONE]
    if job := next((job for job in chosen if job.refused), None):
        raise UsageError("HT821.never-started", job=job, reason=explained(job))
    if chosen and chosen[0].state != "PENDING":
        return chosen
    if any(job.state == "PENDING" for job in named.jobs):
        raise UsageError("HT821.already-pending", named=named)
    raise UsageError("HT821.all-tasks-ended", named=named)


def _requeue(job: slurm.QueuedJob) -> None:
    from hpctrain.jobs.job_facts import state_text

    state = state_text(job.state, job.code)
    try:
        slurm.requeue(job.label, os.environ)
    except slurm.NoAnswerError as error:
        raise StartError("HT821.not-requeued", job=job, state=state, error=error) from None
    put(f"job {job.label}, which was {state}, waits for its next start\n")
