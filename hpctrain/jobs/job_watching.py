"""What a person sees of jobs: tables, what they have used, and the wait for their end."""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpctrain import rundir
from hpctrain.cluster import slurm
from hpctrain.cluster.slurm.shared_jobs import SharedJobs
from hpctrain.cluster.texts import printable, shortened
from hpctrain.errors import UsageError, exit_codes
from hpctrain.jobs import log_names
from hpctrain.jobs.job_facts import Progress, notes, state_text, waiting_since
from hpctrain.jobs.job_status import JobStatus
from hpctrain.jobs.units import slurm_seconds
from hpctrain.rundir import RunDirectory, used
from hpctrain.rundir.used import Used

HEADS = (
    *("JOB", "NAME", "STATE", "NODES", "RESTARTS", "USED", "LEFT"),
    *("STEP", "EPOCH", "LOSS", "SAMPLES/S", "RUN, OR WHY IT WAITS"),
)
#: Columns of numbers.
RIGHT = ("NODES", "RESTARTS", "USED", "LEFT", "STEP", "EPOCH", "LOSS", "SAMPLES/S")
_LONGEST_NAME = 32
_REFUSED = UsageError.exit_code
_LONGEST_REASON = 500


def row_of(status: JobStatus) -> tuple[str, ...]:
    """Return the row of a job or a run, by `HEADS`."""
    run = rundir.RunDirectory(status.run_dir).current().path if status.run_dir else None
    other = f", which has the run of job {status.owner}" if status.owner else ""
    texts = [f"{place(run)}{other}"] if run else []
    figures = _figures(status.progress)
    if status.queued is not None:
        cells, text = _queued(status.queued)
        return (status.label, *cells, *figures, "; ".join([*texts, *text]))
    if status.ended is not None:
        state = state_text(status.ended.state, status.ended.code)
        texts += [f"exit code {status.ended.code}"] if status.ended.code else []
    else:
        state = shortened(printable(status.run_status), _LONGEST_NAME)
        reason = status.progress.reason if status.progress else ""
        texts += [shortened(printable(reason), _LONGEST_REASON)] if reason else []
    # The default run directory is NAME-LABEL.
    name, _, label = status.run_dir.name.rpartition("-") if status.run_dir else ("", "", "")
    name = shortened(printable(name), _LONGEST_NAME) if label == status.label else ""
    return (status.label, name, state, *[""] * 4, *figures, "; ".join(texts))


def _queued(job: slurm.QueuedJob) -> tuple[tuple[str, ...], list[str]]:
    """Return the cells from NAME to LEFT, and the texts of the last cell."""
    waits = job.state == "PENDING"
    texts = [text] if (text := notes(job)) else []
    if waits:
        texts += [text for text in [waiting_since(job)] if text]
        texts += [f"after {printable(job.dependency)}"] if job.dependency else []
        texts += [f"expected start {job.start.replace('T', ' ')}"] if "T" in job.start else []
    return (
        shortened(printable(job.name), _LONGEST_NAME),
        state_text(job.state, job.code),
        f"{job.nodes or ''} {'' if waits else printable(job.hosts)}".strip(),
        str(job.restarts or ""),
        "" if waits else job.used,
        job.left if job.active else "",
    ), texts


def details(status: JobStatus, more: Sequence[tuple[str, str]] = ()) -> str:
    """Return lines about a job that need more space than a row, such as cause, time and log.

    Args:
        status: status of the job.
        more: lines about its wait, or about what it has used, each with its name.
    """
    lines = [*more, *([("cause:", status.failure)] if status.failure else [])]
    lines += [("stopped:", status.stop)] if status.stop else []
    if status.progress is not None and status.progress.effective is not None:
        lines.append(("time:", str(status.progress.effective)))
    if status.run_dir is not None and not status.owner:
        from hpctrain.jobs.changes import since_previous  # for named jobs only

        lines += [("changed:", text)] if (text := since_previous(status.run_dir)) else []
    if status.log is not None and os.path.exists(status.log):
        lines.append(("log:", place(status.log)))
    # A job that was refused there would be refused again.
    refused = status.queued is not None and status.owner and status.queued.code == _REFUSED
    ended = (status.failed or status.stopped) and not refused
    if ended and status.run_dir is not None and _has_checkpoints(status.run_dir):
        again = f"--run-dir {shlex.quote(place(status.run_dir))} -- … --resume"
        ways = [f"hpctrain submit … {again} (with other code or options)"]
        if status.queued is not None:
            ways.insert(0, f"hpctrain requeue {status.label}")
        lines += zip(("continue:", "or:"), ways, strict=False)
    return "".join(f"  {name:9} {text}\n" for name, text in lines)


def _has_checkpoints(run: Path) -> bool:
    try:
        return rundir.RunDirectory(run).furthest() is not None
    except OSError:  # the run of another user
        return False


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return the rows in columns; the first row is the head. Empty columns are left out.

    Args:
        rows: rows of printable text.
        width: characters of a line; longer lines are cut. None for no limit.
    """
    columns = []
    for number, (head, *cells) in enumerate(zip(*rows, strict=True)):
        if number == 0 or any(cells):
            align = str.rjust if head in RIGHT else str.ljust
            widest = max(map(len, (head, *cells)))
            columns.append([align(cell, widest) for cell in (head, *cells)])
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return "".join(f"{shortened(line, width or len(line))}\n" for line in lines)


def _figures(run: Progress | None) -> tuple[str, str, str, str]:
    """Return the cells from STEP to SAMPLES/S; unknown values are empty."""
    run = run or Progress()
    return (
        "" if run.step is None else str(run.step),
        "" if run.epoch is None else str(run.epoch + 1),
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.speed is None else f"{run.speed:.0f}",
    )


def place(path: Path) -> str:
    """Return a path, relative to the current folder if it is below."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # the current folder was removed
        return printable(path)
    text = os.path.normpath(os.path.join(folder, path))
    return printable(os.path.relpath(text, folder) if text.startswith(folder + os.sep) else text)


def curves(run: str | os.PathLike[str]) -> dict[str, tuple[list[int], list[float]]]:
    """Return the metrics of a run so far: by name, the steps and the values.

    `plt.plot(*curves(run)["loss"])` draws one. Empty if the run has logged nothing.

    Args:
        run: run directory of any launcher.

    Raises:
        UsageError: the folder has no run.
    """
    directory = rundir.RunDirectory(run).current()
    if not os.path.exists(directory.identity):
        raise directory.missing()
    columns = directory.columns()
    return {name: columns[name] for name in columns if name not in rundir.POSITIONS}


# --- what a job has used

_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class JobUse:
    """What a job has used; what is not known is None.

    Attributes:
        nodes: number of its hosts.
        seconds: seconds since its start.
        time: these seconds, as squeue shows them.
        task_memory: most bytes of a task in Slurm's accounting.
        ranks: what the ranks of its run have recorded.
        enough: options that would have been enough, with their values.
    """

    nodes: int | None
    seconds: int | None
    time: str
    task_memory: float | None
    ranks: Used | None
    enough: Mapping[str, str]

    def lines(self) -> list[tuple[str, str]]:
        """Return lines about it, each with its name."""
        found = []
        if self.nodes and self.seconds:
            hours = self.nodes * self.seconds / 3600
            found.append(("used:", f"{hours:.2f} host hours: {self.nodes} × {self.time} (squeue)"))
        if self.task_memory:
            found.append(("memory:", f"at most {self.task_memory / _GB:.2f} GB of a task (sacct)"))
        if self.ranks is not None:
            lines = used.lines(self.ranks)
            found += [(f"{name}:", f"{text} (timings.jsonl)") for name, text in lines]
        if self.enough:
            found.append(("enough:", used.options_text(self.enough)))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `hpctrain status --used --json`."""
        seconds = (self.nodes or 0) * (self.seconds or 0)
        return {
            "host_hours": round(seconds / 3600, 4) or None,
            "memory_of_a_task": self.task_memory,
            "ranks": self.ranks and self.ranks.as_json(),
            "enough": {
                name: self.enough.get(f"--{name.replace('_', '-')}")
                for name in ("time", "memory", "cpus_per_task")
            },
        }


def use_of(status: JobStatus, env: Mapping[str, str]) -> JobUse:
    """Return what a job has used.

    Args:
        status: status of the job and of its run.
        env: environment of Slurm's commands.
    """
    job = status.queued
    started = job is not None and job.state != "PENDING"
    seconds = slurm_seconds(job.used) if job is not None and started else None
    ranks = None
    if status.run_dir is not None:
        directory = RunDirectory(status.run_dir).current()
        try:
            ranks = used.measure(directory.each(directory.timings))
        except OSError:  # the run of another user
            ranks = None
    ended = job is not None and job.state == "COMPLETED" and not job.restarts
    return JobUse(
        nodes=job.nodes if job is not None else None,
        seconds=seconds,
        time=job.used if job is not None else "",
        task_memory=slurm.largest_memory(status.label, env) or None,
        ranks=ranks,
        enough=used.enough(ranks, seconds if ended else None),
    )


# --- the wait for the end of a job

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
    text = state_text(job.state, job.code)
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
