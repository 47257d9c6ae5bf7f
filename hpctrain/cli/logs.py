"""`hpctrain logs`: show the log of a job, or follow it to the end of the job."""

import argparse
import os
import re
import sys
from pathlib import Path

from hpctrain.cli.argument_types import RUN
from hpctrain.cli.terminal import INTERRUPTED, note
from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError, exit_codes
from hpctrain.jobs import job_status, job_watching
from hpctrain.jobs.job_facts import state_text
from hpctrain.jobs.job_status import JobStatus
from hpctrain.jobs.job_watching import Log, Stream, wait, worst
from hpctrain.rundir import RunDirectory

__all__ = ["add"]

_FAILED = "failed"
_RANK = re.compile(r"rank ([0-9]+) ")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Writes the log of a job to standard output, of all its starts. Each line of a job with "
        "several ranks begins with its rank. Of a run without a job, writes the log of rank 0. "
        "With --follow, waits for more until the job has ended, also through requeues, and returns "
        "its exit code; Ctrl-C does not end the job."
    )
    parser.add_argument("name", **RUN)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow the log to the end of the job"
    )
    parser.add_argument(
        "--rank",
        metavar=f"N|{_FAILED}",
        help="only the lines of this rank, or of the rank that has failed first",
    )
    parser.set_defaults(command=_main)


class _OneRank:
    """Stream that passes on the lines of one rank, without its number.

    Args:
        rank: number of the rank.
        out: stream that gets the lines.
    """

    def __init__(self, rank: str, out: Stream) -> None:
        self._begin, self._out, self._rest = f"{rank}: ".encode(), out, b""

    def write(self, text: bytes) -> None:
        """Write the complete lines of the rank."""
        *lines, self._rest = re.split(rb"(?<=[\n\r])", self._rest + text)
        for line in lines:
            self._pass_on(line)

    def flush(self) -> None:
        """Flush the other stream."""
        self._out.flush()

    def close(self) -> None:
        """Write a last line without an end."""
        self._pass_on(self._rest)
        self._out.flush()

    def _pass_on(self, line: bytes) -> None:
        if line.startswith(self._begin):
            self._out.write(line.removeprefix(self._begin))


def _main(arguments: argparse.Namespace) -> int:
    status = _found(arguments.name)
    rank = _rank(arguments.rank, status) if arguments.rank is not None else None
    path, in_job = status.log, True
    if path is None and not status.label and status.run_dir is not None:
        path, in_job = RunDirectory(status.run_dir).current().log(int(rank or 0)), False
    sys.stdout.flush()
    one = rank is not None and in_job
    out = _OneRank(str(rank), sys.stdout.buffer) if one else sys.stdout.buffer
    code = exit_codes.DONE
    if arguments.follow and status.queued is not None and status.queued.active:
        code = _follow(status.queued, out)
    else:
        _copy(status, path, out)
    if isinstance(out, _OneRank):
        out.close()
    out.flush()
    return code


def _found(name: str) -> JobStatus:
    """Return the status of the only job or run with a name.

    Raises:
        UsageError: there is none, or there are several.
    """
    try:
        found = job_status.named(name, slurm.jobs(os.environ, uid=os.getuid()), os.environ)
    except slurm.NoAnswerError as error:
        note(f"Slurm does not answer: {error}")
        found = job_status.without_slurm([name])
    if len(found) != 1:
        labels = ", ".join(status.label for status in found)
        raise UsageError("HT818.several-jobs", name=printable(name), labels=labels, jobs=found)
    return found[0]


def _rank(text: str, status: JobStatus) -> str:
    """Return the number of a rank.

    Raises:
        UsageError: the text is no number, or it is not known which rank has failed.
    """
    if text.isascii() and text.isdigit():
        return str(int(text))
    match = _RANK.match(status.failure) if text == _FAILED else None
    if match is None and text == _FAILED:
        failure = status.failure or "no failure is recorded"
        raise UsageError("HT804.no-failed-rank", failure=failure)
    if match is None:
        raise UsageError("HT804.invalid-rank", rank=printable(text))
    return match[1]


def _follow(job: slurm.QueuedJob, out: Stream) -> int:
    try:
        outcomes = wait(job.label, os.environ, note, Log(0, out))
    except KeyboardInterrupt:
        note(f"job {job.label} continues")
        return INTERRUPTED
    code = worst(outcomes)
    note(f"job {job.label} has ended: {state_text(outcomes[0].state, code)}, exit code {code}")
    return code


def _copy(status: JobStatus, path: Path | None, out: Stream) -> None:
    """Write the log as it is.

    Raises:
        UsageError: there is no log, or it cannot be read.
    """
    try:
        with open(path or "", "rb") as file:
            while text := file.read(1 << 20):
                out.write(text)
    except OSError as error:
        waits = status.queued is not None and status.queued.state == "PENDING"
        reason = "the job waits" if waits else error.strerror
        name = status.label or status.run_dir
        log = job_watching.place(path) if path else "file name unknown"
        raise UsageError("HT828.no-log", name=name, log=log, reason=reason) from None
