"""Waiting for the end of a job, through its requeues, while its log is read."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hpctrain import rundir
from hpctrain.cluster import slurm
from hpctrain.cluster.hostlist import expand
from hpctrain.jobs.log_names import filled
from hpctrain.jobs.slurm_reasons import explained, plain

__all__ = ["Log", "Outcome", "log_path", "wait", "worst"]

# Seconds between two queries to Slurm: few for a short job, more for a long one.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 10.0
_GROWTH = 1.15
# Seconds between two reads of the log.
_BLINK = 0.5
# A file system may show the last lines only after the job's end.
_LAST_LOOKS = 3
# States that a requeued job may have for a moment.
_TWICE = frozenset({"BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "PREEMPTED", "REVOKED"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a job, or of a task of an array.

    Attributes:
        label: label of the job, such as 70 or 70_3.
        word: state in Slurm's words; "unknown to Slurm" if Slurm has no record any more.
        exit_code: exit code of the job; 1 if the job did not complete and has no exit code.
        job: last record from Slurm, if there was one.
    """

    label: str
    word: str
    exit_code: int
    job: slurm.Job | None = field(default=None, compare=False)


class Log:
    """Log of a job, which appears late and grows.

    Args:
        pattern: pattern of the file name, as sbatch takes it; relative to the job's folder.
        begun: bytes that were there before the job; they are not shown.
        out: stream that gets the text.
    """

    def __init__(self, pattern: str, begun: int, out: BinaryIO) -> None:
        """Set up the log; nothing is read yet."""
        self._pattern, self._at, self._out = pattern, begun, out
        self.path: Path | None = None

    def read(self, job: slurm.Job | None) -> bool:
        """Write new text to the stream; return whether there was any.

        Args:
            job: record from Slurm; needed until it gives the name of the log.
        """
        if self.path is None and job is not None:
            self.path = log_path(self._pattern, job)
        if self.path is None:
            return False
        new = False
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0  # the file was emptied
                file.seek(self._at)
                while piece := file.read(2**16):
                    self._at += len(piece)
                    self._out.write(piece)
                    new = True
        except OSError:
            return False
        self._out.flush()
        return new


def log_path(pattern: str, job: slurm.Job) -> Path | None:
    """Return the log of a job; None if its name is unknown, or unknown until the job has hosts."""
    known = {
        "A": job.array, "a": job.task, "j": job.number, "J": job.number, "n": "0", "s": "batch",
        "t": "0", "u": job.user, "x": job.name,
    }  # fmt: skip
    if job.hosts:
        known["N"] = expand(job.hosts)[0].partition(".")[0]
    try:
        return Path(job.folder, filled(pattern, known))
    except LookupError:
        return None


def wait(
    number: str,
    env: Mapping[str, str],
    tell: Callable[[str], None],
    log: Log | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Outcome]:
    """Wait until a job, or all tasks of an array, have ended; also through requeues.

    Args:
        number: job number from sbatch.
        env: environment for Slurm's commands.
        tell: function that gets a line for the user after each change.
        log: log of a job that is no array, to read in the meantime.
        sleep: function that sleeps for a number of seconds.
    """
    seen: dict[str, slurm.Job] = {}
    story = _Story(tell)
    pause, over, silent = _FIRST_PAUSE, False, False
    while True:
        try:
            found = {job.label: job for job in slurm.jobs(env, [number])}
            silent = False
        except slurm.NoAnswerError as error:
            if not silent:
                tell(f"Slurm does not answer, it is asked again: {error}")
            silent, found = True, None
        if found is not None:
            # Pending tasks are one row, which they leave one after the other.
            seen = {label: job for label, job in seen.items() if "[" not in label} | found
            story.goes_on(found)
            if not any(job.lives for job in found.values()):
                sure = over or not any(job.word in _TWICE for job in found.values())
                if sure:
                    break
                over = True
            else:
                over = False
        _pass_on(log, seen, pause, sleep)
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)
    outcomes = _outcomes(number, seen, found, env)
    if log is not None:
        _last_lines(log, seen, sleep)
    return outcomes


def worst(outcomes: Sequence[Outcome]) -> int:
    """Return the worst exit code: any failure first, then given up (76), then stopped (75)."""
    ranks = {rundir.DONE: 0, rundir.STOPPED: 1, rundir.GIVEN_UP: 2}
    return max((one.exit_code for one in outcomes), key=lambda code: (ranks.get(code, 3), code))


class _Story:
    """Report of changes since the last query."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._last: dict[str, str] = {}

    def goes_on(self, jobs: Mapping[str, slurm.Job]) -> None:
        for label, job in jobs.items():
            line = plain(job.word).lower()
            if job.restarts and job.lives:
                line += f" after {job.restarts} restart{'s' * (job.restarts > 1)}"
            if job.word == "RUNNING":
                line += f" on {plain(job.hosts)}"
            elif why := explained(job):
                line += f": {why}"
            if self._last.get(label) != line:
                self._last[label] = line
                self._tell(f"job {label}: {line}")


def _pass_on(
    log: Log | None, seen: Mapping[str, slurm.Job], pause: float, sleep: Callable[[float], None]
) -> None:
    """Sleep, and read the log in the meantime."""
    job = next(iter(seen.values()), None)
    while log is not None and pause > _BLINK:
        log.read(job)
        sleep(_BLINK)
        pause -= _BLINK
    sleep(pause)


def _last_lines(log: Log, seen: Mapping[str, slurm.Job], sleep: Callable[[float], None]) -> None:
    job = next(iter(seen.values()), None)
    log.read(job)
    for _ in range(_LAST_LOOKS):
        sleep(_BLINK)
        if not log.read(job) and log.path is not None and log.path.exists():
            return


def _outcomes(
    number: str,
    seen: Mapping[str, slurm.Job],
    found: Mapping[str, slurm.Job] | None,
    env: Mapping[str, str],
) -> list[Outcome]:
    """Return the last states from Slurm; for forgotten jobs, ask its accounting."""
    known = {job.label: Outcome(job.label, job.word, _code(job.word, job.code), job)
             for job in seen.values() if not job.lives}  # fmt: skip
    if not seen or any(label not in (found or {}) for label in seen if label not in known):
        try:
            for one in slurm.ended(number, env):
                if one.label not in known and one.word in slurm.ENDED:
                    code = _code(one.word, one.code)
                    known[one.label] = Outcome(one.label, one.word, code, seen.get(one.label))
        except slurm.NoAnswerError:
            pass
        for job in seen.values():
            known.setdefault(job.label, Outcome(job.label, slurm.FORGOTTEN, rundir.FAILED, job))
    # Tasks that never ran are cancelled as one row, by the number of the array.
    return list(known.values()) or [Outcome(number, slurm.FORGOTTEN, rundir.FAILED)]


def _code(word: str, code: int) -> int:
    # The script of a cancelled job may exit with 75, which would request another start.
    if word == "CANCELLED":
        return rundir.FAILED
    return code or (rundir.DONE if word == "COMPLETED" else rundir.FAILED)
