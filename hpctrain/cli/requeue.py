"""`hpctrain requeue`: let jobs start again, with the same number and run directory."""

import argparse
import os
import sys
from typing import Any

from hpctrain import rundir, slurm
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import naming
from hpctrain.jobs.reasons import plain

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "requeue",
        help="let jobs start again from their last checkpoints",
        description="The job keeps its number and goes on in the same run directory. One that runs "
        "is ended for it; what came after its last checkpoint is done again.",
    )
    parser.add_argument(
        "words", nargs="+", metavar="RUN", help="a job's number, a run directory, or a job's name"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    named = naming.own_jobs(arguments.words, os.environ)
    for one in named:
        if waiting := [job for job in one.jobs if job.word == "PENDING"]:
            raise UsageError(
                f"job {waiting[0].label} waits already", "a job that runs, or has ended lately",
                f"hpctrain status {one.label}    says what it waits for",
            )  # fmt: skip
    for one in named:
        _requeue(one)
    return rundir.DONE


def _requeue(one: naming.Named) -> None:
    word = plain(one.jobs[0].word).lower()
    try:
        slurm.requeue(one.label, os.environ)
    except slurm.NoAnswerError as error:
        raise StartError(
            f"job {one.label} ({word}) is not requeued: {error}",
            "a job that was submitted with --requeue, and a Slurm that answers",
            "the same hpctrain submit, with --run and its run directory, and --resume last",
        ) from None
    sys.stdout.write(f"job {one.label}, which was {word}, waits for its next start\n")
