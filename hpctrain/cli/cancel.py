"""`hpctrain cancel`: cancel jobs by number, run or name."""

import argparse
import os
import shlex
from typing import Any

from hpctrain import rundir
from hpctrain.cli.terminal import put
from hpctrain.cluster import slurm
from hpctrain.errors import StartError
from hpctrain.jobs import lookup, run_progress
from hpctrain.jobs.slurm_reasons import plain

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "cancel",
        help="cancel jobs; their checkpoints are kept",
        description="Cancels the named jobs and nothing else: if a name fits several jobs that "
        "have not ended, lists them and cancels none.",
    )
    parser.add_argument(
        "words", nargs="+", metavar="RUN", help="job number, run directory, or job name"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Look up all jobs before cancelling the first.
    for one in lookup.own_jobs(arguments.words, os.environ, living=True):
        try:
            _cancel(one)
        except slurm.NoAnswerError as error:
            raise StartError(
                "HT816", f"job {one.label} is not cancelled: {error}", "an answer"
            ) from None
    return rundir.DONE


def _cancel(one: lookup.Named) -> None:
    live = [job for job in one.jobs if job.lives]
    if not live:
        _say(f"job {one.label} has ended already: {plain(one.jobs[0].word).lower()}")
        return
    runs = [run_progress.run_of(job, os.environ) for job in live]
    slurm.cancel([one.label], os.environ)
    _say(f"job {one.label} ({plain(live[0].name)}) is cancelled")
    for run in runs:
        if run is None:
            continue
        steps = rundir.RunDirectory(run).steps()
        if steps:
            # The run saves once more before it ends.
            newest = f"the newest of step {steps[-1]} or later"
            path = plain(str(run))
            _say(f"{path} keeps its checkpoints, {newest}")
            _say(f"to go on: hpctrain submit … --run-dir {shlex.quote(path)} -- … --resume")
        else:
            _say(f"{plain(str(run))} has no checkpoint yet")


def _say(line: str) -> None:
    put(f"{line}\n")
