"""`hpctrain submit`: submit a job to Slurm, or run it on this machine."""

import argparse
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from hpctrain.cli.job_options import EXAMPLE, Described, add_job_options, gather, option
from hpctrain.errors import UsageError
from hpctrain.jobs import script, submission
from hpctrain.jobs.spec import JobSpec

__all__ = ["add"]

_MOST_FAILURES = 10
_DETACHED = 130  # a shell's exit code after Ctrl-C


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.allow_abbrev = False  # options after the command belong to it
    parser.usage = "hpctrain submit [options] [JOB.toml] [-- COMMAND ...]"
    parser.description = (
        "Writes the batch script of a job and submits it from the current folder. "
        "Standard output gets only the job's number, standard error its log, its run directory and "
        "the next commands. Options override JOB.toml, which overrides "
        "the profile of --cluster, which overrides site.sh."
    )
    parser.add_argument(
        "--via",
        choices=("sbatch", "submitit", "local"),
        default="sbatch",
        help="how to run the job; local: on this machine, in the foreground, without Slurm "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the script and what would happen, and ask Slurm whether it would accept the "
        "job",
    )
    parser.add_argument("--save", metavar="FILE", help="new JOB.toml to which the job is written")
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
    described = gather(arguments, os.environ)
    spec = described.spec
    if arguments.follow and arguments.via == "submitit":
        raise UsageError(
            "HT804",
            "--follow with --via submitit",
            "its log is read by Python: job.logs()",
            "--wait in place of --follow",
        )
    if arguments.save is not None:
        _save(arguments.save, described)
    if arguments.dry_run:
        return _dry_run(described, arguments.via)
    if arguments.via == "local":
        for note in submission.check(spec, os.environ):
            _print_line(note)
        sys.stdout.flush()
        return submission.run_here(spec, os.environ)
    log = submission.log_size(spec, os.environ)
    job = _submit(spec, arguments.via)
    sys.stdout.write(f"{job}\n")
    sys.stdout.flush()
    _print_next(spec, job, arguments.via)
    if not (arguments.wait or arguments.follow):
        return 0
    return _wait(spec, job, arguments, log)


def _submit(spec: JobSpec, via: str) -> str:
    if via == "submitit":
        from hpctrain.jobs import by_submitit  # which imports submitit

        return by_submitit.submit(spec, os.environ)
    submitted = submission.send(spec, os.environ, option)
    for note in submitted.notes:
        _print_line(note)
    return submitted.job


def _print_next(spec: JobSpec, job: str, via: str) -> None:
    """Print where log and results of a job will be, and the commands to type next."""
    # The indices of an array are numbers and ranges, such as 1-5,8.
    first = re.match("[0-9]*", spec.indices)
    index = int(first[0]) if first and first[0] else None
    task = "" if index is None else f" (task {index})"
    log = submission.log(spec, job, index, os.environ)
    if via == "submitit":
        from hpctrain.jobs import job_store

        log = str(job_store.log_of(job_store.find(job), 0))
    lines = [("log:", f"tail -F {shlex.quote(log)}{task}")] if log else []
    run = submission.run_directory(spec, job, index, os.environ)
    lines += [("run:", f"{shlex.quote(str(run))}{task}")]
    lines += [("state:", f"hpctrain status {job}"), ("cancel:", f"hpctrain cancel {job}")]
    sys.stderr.write("".join(f"  {name:9} {text}\n" for name, text in lines))
    sys.stderr.flush()


def _save(path: str, described: Described) -> None:
    from hpctrain import rundir  # imported here, as below, to keep submission fast
    from hpctrain.jobs import job_files

    try:
        rundir.create(Path(path), job_files.text(described.without_profile, described.explicit))
    except FileExistsError:
        raise UsageError("HT808", f"--save {path} exists", "the name of a new file") from None
    except OSError as error:
        raise UsageError(
            "HT809", f"--save {path}: {error}", "a file in an existing folder"
        ) from None


def _dry_run(described: Described, via: str) -> int:
    """Write the script to standard output, and everything else to standard error."""
    spec = described.spec
    notes = submission.check(spec, os.environ)
    if via == "submitit":
        from hpctrain.jobs import by_submitit

        by_submitit.of_command(spec)
        notes.append("submitit starts each rank, which then runs the command")
    text = script.render_local(spec) if via == "local" else submission.text(spec)
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.buffer.flush()
    for name, source in described.sources.items():
        _print_line(f"{name}: from {source}")
    clean, ignored = submission.environ(spec, os.environ)
    for note in (*notes, *ignored):
        _print_line(note)
    if not_passed := sorted(set(os.environ) - set(clean)):
        _print_line(f"not passed to the job: {', '.join(not_passed)}")
    if via == "local":
        _print_line("would run this script here, by bash")
        return 0
    submission.check_folders(spec, os.environ)
    if folder := submission.log_folder(spec, os.environ):
        _print_line(
            f"would create the folder {folder}" if not folder.is_dir() else f"logs in {folder}"
        )
    _print_line(f"would submit this script in {os.getcwd()}: " + (
        "by submitit" if via == "submitit" else "sbatch --parsable < SCRIPT"
    ))  # fmt: skip
    for line in submission.trial(spec, os.environ, option).splitlines() or [
        "no sbatch here, so Slurm was not asked whether it accepts the job"
    ]:
        _print_line(line)
    return 0


def _wait(spec: JobSpec, job: str, arguments: argparse.Namespace, log_size: int) -> int:
    """Wait until the job has ended, and return its exit code."""
    from hpctrain.jobs import waiting

    log = None
    if arguments.follow and spec.indices:
        _print_line("a job array: a table of its tasks follows at the end, instead of a log")
    elif arguments.follow:
        log = waiting.Log(log_size, sys.stderr.buffer)
    try:
        outcomes = waiting.wait(job, os.environ, _print_line, log)
    except KeyboardInterrupt:
        _print_line(f"job {job} continues")
        _print_next(spec, job, arguments.via)
        return _DETACHED
    if spec.indices:
        _print_table(spec, job, outcomes)
    code = waiting.worst(outcomes)
    states = ", ".join(sorted({outcome.state.lower() for outcome in outcomes}))
    _print_line(f"job {job} has ended: {states}, exit code {code}")
    _print_failures(job, arguments.via, outcomes)
    return code


def _print_failures(job: str, via: str, outcomes: Any) -> None:
    """Print why the tasks have failed, where their logs are, and how to continue."""
    from hpctrain.jobs import job_status, job_store, job_tables

    failed = [outcome for outcome in outcomes if outcome.exit_code and outcome.job]
    for outcome in failed[:_MOST_FAILURES]:
        status = job_status.of_queued(outcome.job, os.environ)
        if outcome.label != job:
            _print_line(f"job {outcome.label}: {outcome.state.lower()}")
        sys.stderr.write(job_tables.details(status))
    if len(failed) > _MOST_FAILURES:
        _print_line(f"and {len(failed) - _MOST_FAILURES} more")
    if failed and via == "submitit":
        _print_line(f"the logs of its ranks are in {job_tables.place(job_store.find(job))}")


def _print_table(spec: JobSpec, job: str, outcomes: Any) -> None:
    from hpctrain.jobs import job_tables

    rows = []
    for outcome in sorted(outcomes, key=lambda outcome: _index(outcome.label)):
        index = _index(outcome.label)
        setting = spec.sweep[index] if 0 <= index < len(spec.sweep) else ()
        options = " ".join(f"--{name} {value}" for name, value in setting)
        rows.append(
            (
                outcome.label,
                options,
                outcome.state,
                submission.run_directory(spec, job, index, os.environ),
            )
        )
    sys.stderr.write(job_tables.aligned(job_tables.of_array(rows)))


def _index(label: str) -> int:
    task = label.partition("_")[2]
    return int(task) if task.isdigit() else -1


def _print_line(line: str) -> None:
    sys.stderr.write(f"hpctrain: {line}\n")
    sys.stderr.flush()
