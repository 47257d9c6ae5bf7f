"""`hpctrain submit`: submit a job to Slurm."""

import argparse
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING

from hpctrain.cli.job_options import EXAMPLE, add_job_options, no_command, spec_from
from hpctrain.cli.terminal import INTERRUPTED, note
from hpctrain.cluster.texts import printable
from hpctrain.jobs import site
from hpctrain.jobs.spec import JobSpec

if TYPE_CHECKING:
    from hpctrain.jobs.job_watching import JobOutcome

__all__ = ["add"]

_MOST_FAILURES = 10


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.allow_abbrev = False  # options after the command belong to it
    parser.usage = "hpctrain submit [options] [JOB.toml] [-- COMMAND ...]"
    parser.description = (
        "Writes the batch script of a job and submits it by sbatch from the current folder. "
        "Standard output gets only the job's number, standard error its log, its run directory and "
        "the next commands. Options override JOB.toml, which overrides "
        "SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_QOS of the shell."
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the script and what would happen, and ask Slurm whether it would accept the "
        "job",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait until the job has ended, also through requeues; return its exit code",
    )
    parser.add_argument(
        "--follow", action="store_true", help="as --wait, with the job's log on standard error"
    )
    add_job_options(parser)
    parser.epilog = f"Example: {EXAMPLE}"
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    from hpctrain.jobs import job_paths, submission  # imported here, as below, for a fast --help

    described = spec_from(arguments)
    if not described.command:
        raise no_command()
    spec = site.completed(described, os.environ)
    if arguments.dry_run:
        return _dry_run(described, spec)
    log = job_paths.log_size(spec, os.environ)
    job, notes = submission.send(spec, os.environ)
    for line in notes:
        note(line)
    sys.stdout.write(f"{job}\n")
    sys.stdout.flush()
    _print_next(spec, job)
    if not (arguments.wait or arguments.follow):
        return 0
    return _wait(spec, job, arguments.follow, log)


def _print_next(spec: JobSpec, job: str) -> None:
    """Print where log and results of a job will be, and the commands to type next."""
    from hpctrain.jobs import job_paths

    # The indices of an array are numbers and ranges, such as 1-5,8.
    first = re.match("[0-9]*", spec.indices)
    index = int(first[0]) if first and first[0] else None
    task = "" if index is None else f" (task {index})"
    log = job_paths.log(spec, job, index, os.environ)
    lines = [("log:", f"tail -F {shlex.quote(log)}{task}")] if log else []
    run = job_paths.run_directory(spec, job, index, os.environ)
    lines += [("run:", f"{shlex.quote(str(run))}{task}")]
    lines += [("follow:", f"hpctrain logs -f {job}")] if index is None else []
    lines += [("state:", f"hpctrain status {job}"), ("cancel:", f"hpctrain cancel {job}")]
    sys.stderr.write("".join(f"  {name:9} {text}\n" for name, text in lines))
    sys.stderr.flush()


def _dry_run(described: JobSpec, spec: JobSpec) -> int:
    """Write the script to standard output, and everything else to standard error."""
    from hpctrain.jobs import job_checks, job_environment, job_paths, submission

    notes = [
        *job_checks.check(spec, os.environ), *submission.size_notes(spec, os.environ)
    ]  # fmt: skip
    sys.stdout.buffer.write(submission.text(spec).encode(errors="surrogateescape"))
    sys.stdout.buffer.flush()
    for name in site.defaults(described, os.environ):
        note(f"{name}: from ${site.VARIABLES[name]}")
    clean, ignored = job_environment.environ(spec, os.environ)
    for line in (*notes, *ignored):
        note(line)
    if not_passed := sorted(set(os.environ) - set(clean)):
        note(f"not passed to the job: {', '.join(not_passed)}")
    folder = job_paths.log_folder(spec, os.environ)
    if not folder.is_dir():
        note(f"would create the folder {folder}")
    note(f"would submit this script in {os.getcwd()}: sbatch --parsable < SCRIPT")
    for line in submission.trial(spec, os.environ).splitlines() or [
        "no sbatch here, so Slurm was not asked whether it accepts the job"
    ]:
        note(line)
    return 0


def _wait(spec: JobSpec, job: str, follow: bool, log_size: int) -> int:
    """Wait until the job has ended, and return its exit code."""
    from hpctrain.jobs import job_watching
    from hpctrain.jobs.job_facts import state_text

    log = job_watching.Log(log_size, sys.stderr.buffer) if follow and not spec.indices else None
    try:
        outcomes = job_watching.wait(job, os.environ, note, log)
    except KeyboardInterrupt:
        note(f"job {job} continues")
        _print_next(spec, job)
        return INTERRUPTED
    code = job_watching.worst(outcomes)
    states = ", ".join(sorted({state_text(one.state, one.exit_code) for one in outcomes}))
    if spec.indices:
        _print_table(spec, outcomes)
    note(f"job {job} has ended: {states}, exit code {code}")
    _print_failures(job, outcomes)
    return code


def _print_table(spec: JobSpec, outcomes: "list[JobOutcome]") -> None:
    """Print the table of `hpctrain status` for the tasks of an array, with their settings."""
    from hpctrain.jobs import job_status, job_watching

    # Tasks that never ran are one row, with several indices.
    tasks = [(int(one.job.task) if one.job.task.isdigit() else -1, one.job)
             for one in outcomes if one.job]  # fmt: skip
    rows = []
    for index, task in sorted(tasks, key=lambda pair: pair[0]):
        *cells, run = job_watching.row_of(job_status.of_queued(task, os.environ))
        setting = spec.sweep[index] if spec.sweep and index >= 0 else ()
        words = [f"--{name} {printable(value)}" for name, value in setting]
        rows.append((*cells, "; ".join([*([" ".join(words)] if words else []), run])))
    sys.stderr.write(job_watching.aligned([job_watching.HEADS, *rows]))


def _print_failures(job: str, outcomes: "list[JobOutcome]") -> None:
    """Print why the tasks have failed, where their logs are, and how to continue."""
    from hpctrain.jobs import job_status, job_watching
    from hpctrain.jobs.job_facts import state_text

    failed = [(one, one.job) for one in outcomes if one.exit_code and one.job]
    for outcome, record in failed[:_MOST_FAILURES]:
        if outcome.label != job:
            note(f"job {outcome.label}: {state_text(outcome.state, outcome.exit_code)}")
        sys.stderr.write(job_watching.details(job_status.of_queued(record, os.environ)))
    if len(failed) > _MOST_FAILURES:
        note(f"and {len(failed) - _MOST_FAILURES} more")
