"""Waiting for the end of a job, through its requeues, while its log is read."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpctrain.cluster import slurm
from hpctrain.cluster.slurm.shared_jobs import SharedJobs
from hpctrain.cluster.texts import printable
from hpctrain.errors import exit_codes
from hpctrain.jobs import log_names
from hpctrain.jobs.failures import in_words
from hpctrain.jobs.slurm_reasons import notes

__all__ = ["JobOutcome", "Log", "Stream", "wait", "worst"]

# Seconds between two queries to Slurm: few for a short job, more for a long one.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 10.0
_GROWTH = 1.15
# Seconds between two reads of the log.
_LOG_SECONDS = 0.5
# A file system may show the last lines only after the job's end.
_LAST_SECONDS = 1.5
_LONGEST_LINE = 1 << 20  # bytes of a line that wait for its end
# States that a requeued job may have for a moment.
_MAY_RESTART = frozenset({"BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "PREEMPTED", "REVOKED"})


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """End of a job, or of a task of an array.

    Attributes:
        label: label of the job, such as 70 or 70_3.
        state: state as Slurm names it; "unknown to Slurm" if Slurm has no record any more.
        exit_code: exit code of the job; 1 if the job did not complete and has no exit code.
        job: last record from Slurm, if there was one.
    """

    label: str
    state: str
    exit_code: int
    job: slurm.QueuedJob | None = field(default=None, compare=False)


class Stream(Protocol):
    """Stream that takes bytes."""

    def write(self, text: bytes, /) -> Any:
        """Write the bytes."""

    def flush(self) -> Any:
        """Pass on what was written."""


class Log:
    """Log of a job, which appears late and grows.

    Args:
        offset: bytes that were there before the job; they are not shown.
        out: stream that gets the text.
    """

    def __init__(self, offset: int, out: Stream) -> None:
        """Set up the log; nothing is read yet."""
        self._at, self._out = offset, out
        self._path: Path | None = None

    def read(self, job: slurm.QueuedJob | None, last: bool = False) -> None:
        """Write new lines to the stream, so that other messages do not come within a line.

        Args:
            job: record from Slurm; needed until it gives the name of the log.
            last: whether to write a line that has no end, too.
        """
        if self._path is None and job is not None:
            self._path = log_names.of_job(job)
        if self._path is None:
            return
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._at)
            while text := file.read(_LONGEST_LINE):
                # A progress bar ends its lines with a carriage return.
                size = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
                if last or (size == 0 and len(text) == _LONGEST_LINE):
                    size = len(text)
                if size == 0:
                    break
                self._out.write(text[:size])
                self._at += size
                file.seek(self._at)
        self._out.flush()


def wait(
    number: str,
    env: Mapping[str, str],
    report: Callable[[str], None],
    log: Log | None = None,
) -> list[JobOutcome]:
    """Wait until a job, or all tasks of an array, have ended; also through requeues.

    Args:
        number: job number from sbatch.
        env: environment for Slurm's commands.
        report: function that gets a line for the user after each change.
        log: log of a job that is no array, to read in the meantime.
    """
    jobs: dict[str, slurm.QueuedJob] = {}
    reported: dict[str, str] = {}
    pause, ended, failed = _FIRST_PAUSE, False, False
    watched = _Watched(number, env)
    while True:
        try:
            listed = watched.look()
        except slurm.NoAnswerError as error:
            if not failed:
                report(f"Slurm does not answer, trying again: {error}")
            failed, listed = True, None
        else:
            failed = False
        if listed is not None:
            # Pending tasks are one row, which they leave one after the other.
            jobs = {label: job for label, job in jobs.items() if "[" not in label} | listed
            for label, job in listed.items():
                if reported.get(label) != (text := _described(job)):
                    reported[label] = text
                    report(f"job {label}: {text}")
            before, ended = ended, not any(job.active for job in listed.values())
            if ended and (before or not any(job.state in _MAY_RESTART for job in listed.values())):
                break
        _sleep_and_read(log, jobs, pause)
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)
    if log is not None:
        _sleep_and_read(log, jobs, _LAST_SECONDS)
        log.read(next(iter(jobs.values()), None), last=True)
    return _outcomes(number, jobs, listed, env)


class _Watched:
    """A job whose state is asked for again and again, in one query for all jobs of the user.

    Args:
        number: number of the job, or of an array.
        env: environment for Slurm's commands.
    """

    def __init__(self, number: str, env: Mapping[str, str]) -> None:
        self._number, self._env = number, env
        self._shared, self._seen = SharedJobs(env), 0.0

    def look(self) -> dict[str, slurm.QueuedJob] | None:
        """Return the job or the tasks of the array by their labels; None if there is no news.

        Raises:
            NoAnswerError: Slurm did not answer.
        """
        listing = self._shared.look()
        if listing.taken == self._seen:
            return None
        self._seen = listing.taken
        found = [job for job in listing.jobs if self._number in (job.label, job.array, job.number)]
        if not found and listing.taken < self._shared.began:
            return None  # the job may be newer than this answer
        # It may be another user's, or Slurm has forgotten it.
        found = found or slurm.jobs(self._env, [self._number])
        return {job.label: job for job in found}


def worst(outcomes: Sequence[JobOutcome]) -> int:
    """Return the worst exit code: any failure first, then given up (76), then stopped (75)."""
    severity = {exit_codes.DONE: 0, exit_codes.STOPPED: 1, exit_codes.GIVEN_UP: 2}
    return max(
        (outcome.exit_code for outcome in outcomes), key=lambda code: (severity.get(code, 3), code)
    )


def _described(job: slurm.QueuedJob) -> str:
    """Return the state of a job in words."""
    text = in_words(job.state, job.code)
    if job.restarts and job.active:
        text += f" after {job.restarts} restart{'s' * (job.restarts > 1)}"
    if job.state == "RUNNING":
        return f"{text} on {printable(job.hosts)}"
    reason = notes(job)
    return f"{text}: {reason}" if reason else text


def _sleep_and_read(log: Log | None, jobs: Mapping[str, slurm.QueuedJob], pause: float) -> None:
    """Sleep, and read the log in the meantime."""
    job = next(iter(jobs.values()), None)
    while log is not None and pause > 0:
        time.sleep(_LOG_SECONDS)
        log.read(job)
        pause -= _LOG_SECONDS
    if pause > 0:
        time.sleep(pause)


def _outcomes(
    number: str,
    jobs: Mapping[str, slurm.QueuedJob],
    listed: Mapping[str, slurm.QueuedJob],
    env: Mapping[str, str],
) -> list[JobOutcome]:
    """Return the last states from Slurm; for forgotten jobs, ask its accounting."""
    ends = {label: (job.state, job.code) for label, job in jobs.items() if not job.active}
    if not jobs or any(label not in ends and label not in listed for label in jobs):
        for record in slurm.ended(number, env):
            if record.state in slurm.ENDED:
                ends.setdefault(record.label, (record.state, record.code))
    # Tasks that never ran are cancelled as one row, by the number of the array.
    for label in jobs or ([] if ends else [number]):
        ends.setdefault(label, (slurm.FORGOTTEN, 0))
    return [
        JobOutcome(label, state, _code(state, code), jobs.get(label))
        for label, (state, code) in ends.items()
    ]


def _code(state: str, code: int) -> int:
    # The script of a cancelled job may exit with 75, which would request another start.
    if state == "CANCELLED":
        return exit_codes.FAILED
    return code or (exit_codes.DONE if state == "COMPLETED" else exit_codes.FAILED)
