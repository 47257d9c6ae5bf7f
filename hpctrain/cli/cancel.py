"""`hpctrain cancel`: cancel jobs by number, run or name."""

import argparse
import os
import shlex

from hpctrain import rundir
from hpctrain.cli.argument_types import RUN
from hpctrain.cli.terminal import put
from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable
from hpctrain.errors import StartError, exit_codes
from hpctrain.jobs import job_facts, job_status

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Cancels the named jobs and nothing else: if a name fits several jobs that "
        "have not ended, lists them and cancels none."
    )
    parser.add_argument("names", nargs="+", **RUN)
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Look up all jobs before cancelling the first.
    for named in job_status.own_jobs(arguments.names, os.environ, active_first=True):
        try:
            _cancel(named)
        except slurm.NoAnswerError as error:
            raise StartError("HT816.not-cancelled", label=named.label, error=error) from None
    return exit_codes.DONE


def _cancel(named: job_status.Named) -> None:
    active_jobs = [job for job in named.jobs if job.active]
    if not active_jobs:
        from hpctrain.jobs.job_facts import state_text

        state = state_text(named.jobs[0].state, named.jobs[0].code)
        put(f"job {named.label} has ended already: {state}\n")
        return
    runs = [job_facts.run_of(job, os.environ) for job in active_jobs]
    slurm.cancel([named.label], os.environ)
    put(f"job {named.label} ({printable(active_jobs[0].name)}) is cancelled\n")
    for run in runs:
        if run is None:
            continue
        steps = rundir.RunDirectory(run).current().steps()
        if steps:
            # The run saves once more before it ends.
            newest = f"the newest of step {steps[-1]} or later"
            path = printable(run)
            again = f"--run-dir {shlex.quote(path)} -- … --resume"
            put(f"{path} keeps its checkpoints, {newest}\n")
            put(f"to continue: hpctrain submit … {again}\n")
        else:
            put(f"{printable(run)} has no checkpoint yet\n")
