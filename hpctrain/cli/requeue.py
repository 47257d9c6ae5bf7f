"""`hpctrain requeue`: start jobs again, with the same number and run directory."""

import argparse
import os
from typing import Any

from hpctrain import rundir
from hpctrain.cli.terminal import put
from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import lookup
from hpctrain.jobs.slurm_reasons import explained, plain

__all__ = ["add"]

# States of array tasks that are started again only if the task itself is named.
_LEFT_ALONE = ("PENDING", "COMPLETED", "CANCELLED")


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "requeue",
        help="start jobs again from their last checkpoints",
        description="The job keeps its number and continues in the same run directory. A running "
        "job is ended first, and the steps after its last checkpoint are repeated. For a job "
        "array, requeues the tasks that run or have failed.",
    )
    parser.add_argument(
        "words", nargs="+", metavar="RUN", help="job number, run directory, or job name"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    named = lookup.own_jobs(arguments.words, os.environ)
    # Check all jobs before requeueing the first.
    for job in [job for one in named for job in _chosen(one)]:
        _requeue(job)
    return rundir.DONE


def _chosen(one: lookup.Named) -> list[slurm.Job]:
    """Return the job itself; for an array, the tasks that run and those that failed."""
    chosen = [job for job in one.jobs if job.label == one.label]
    chosen = chosen or [job for job in one.jobs if job.word not in _LEFT_ALONE]
    if refused := [job for job in chosen if job.refused]:
        raise UsageError(
            "HT821",
            f"job {refused[0].label} never started: {explained(refused[0])}",
            "a job that runs, or has ended lately",
            "hpctrain submit, with what Slurm can give",
        )
    if chosen and chosen[0].word != "PENDING":
        return chosen
    if any(job.word == "PENDING" for job in one.jobs):
        raise UsageError(
            "HT821", f"job {one.label} waits already", "a job that runs, or has ended lately",
            f"hpctrain status {one.label} (says what it waits for)",
        )  # fmt: skip
    raise UsageError(
        "HT821",
        f"the tasks of job {one.label} are done or cancelled",
        "a task that runs or has failed",
        f"hpctrain requeue {one.jobs[0].label} (does one again all the same)",
    )


def _requeue(job: slurm.Job) -> None:
    word = plain(job.word).lower()
    try:
        slurm.requeue(job.label, os.environ)
    except slurm.NoAnswerError as error:
        raise StartError(
            "HT821",
            f"job {job.label} ({word}) is not requeued: {error}",
            "a job that was submitted with --requeue, and a Slurm that answers",
            "the same hpctrain submit, with --run-dir and its run directory, and --resume last",
        ) from None
    put(f"job {job.label}, which was {word}, waits for its next start\n")
