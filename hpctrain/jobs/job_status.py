"""Status of a job and of its run: facts from Slurm and from the run directory."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.cluster import slurm
from hpctrain.cluster.hostlist import expand
from hpctrain.errors import UsageError
from hpctrain.jobs import failures, log_names, lookup
from hpctrain.jobs.run_progress import Progress, label_of, last_job, progress, run_of
from hpctrain.jobs.slurm_reasons import bare, explained
from hpctrain.jobs.units import slurm_date, slurm_seconds

__all__ = ["JobStatus", "as_json", "listed", "named", "of_queued", "without_slurm"]

# Status of a run that has recorded no end, and of a folder without a run, if their job is over.
INTERRUPTED, NEVER_BEGAN = "interrupted", "never began"
_MOST_RUNS = 10


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of a job, or of a run without a job in Slurm.

    Attributes:
        label: label of the job; empty if no job is known for the run.
        queued: record in the controller's list, or None.
        ended: record in Slurm's accounting, or None.
        run_dir: run directory, or None.
        forgotten: whether Slurm has answered, and does not list the job of the run any more.
        owner: label of another job, if the job has ended and the run is of that one.
        progress: progress of the run; None if the run directory has no run of the job yet.
    """

    label: str
    queued: slurm.QueuedJob | None = None
    ended: slurm.Ended | None = None
    run_dir: Path | None = None
    forgotten: bool = False
    owner: str = field(init=False)
    progress: Progress | None = field(init=False)

    def __post_init__(self) -> None:
        """Read the progress of the run."""
        owner = last_job(self.run_dir) if self.run_dir and self.queued else ""
        if self.queued is None or self.queued.active or owner == self.label:
            owner = ""
        found = progress(self.run_dir) if self.run_dir and not owner else None
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "progress", found)

    @property
    def run_status(self) -> str:
        """Status of the run, if it has a directory."""
        over = self.forgotten or self.ended is not None
        over = over or (self.queued is not None and not self.queued.active)
        if self.progress is None:
            return NEVER_BEGAN if over else "no run yet"
        return self.progress.status or (INTERRUPTED if over else "not ended")

    @property
    def log(self) -> Path | None:
        """Path of the job's log; None if it is unknown."""
        if self.queued is not None:
            return log_names.of_job(self.queued)
        return log_names.of_forgotten(self.label)

    @property
    def failed(self) -> bool:
        """Whether the job has ended without success; False for a cancelled or stopped one."""
        if record := self.queued or self.ended:
            return not self.stopped and record.state in slurm.ENDED - {"COMPLETED", "CANCELLED"}
        return self.run_status in (*failures.FAILED, INTERRUPTED, NEVER_BEGAN)

    @property
    def stopped(self) -> bool:
        """Whether the job was stopped, and not started again; for Slurm it has failed."""
        record = self.queued or self.ended
        return record is not None and failures.in_words(record.state, record.code) == "stopped"

    @property
    def failure(self) -> str:
        """Why the job has failed, in one line; empty if it has not, or if that is unknown."""
        record = self.queued or self.ended
        unknown = record is None and self.progress is not None and not self.progress.status
        if not (self.failed or unknown):
            return ""
        cause = self._cause()
        # On a full disk neither the run nor the log may have it.
        full = rundir.full_now(self.run_dir) if self.run_dir and "disk" not in cause else ""
        return "; ".join(filter(None, (cause, full)))

    @property
    def stop(self) -> str:
        """What has stopped the job, in one line; empty if nothing has, or if that is unknown."""
        return self._cause() if self.stopped else ""

    def _cause(self) -> str:
        record = self.queued or self.ended
        code = record.code if record else None
        # In another state, such as TIMEOUT, Slurm has ended the job.
        by_itself = record is not None and record.state == "FAILED"
        return failures.cause(self.progress, self.log, code, by_itself)


def of_queued(job: slurm.QueuedJob, env: Mapping[str, str]) -> JobStatus:
    """Return the status of a job in the controller's list."""
    return JobStatus(job.label, job, run_dir=run_of(job, env))


def without_slurm(names: Sequence[str]) -> list[JobStatus]:
    """Return the status of the named runs, or of all below ./runs, from their directories only.

    Raises:
        UsageError: no run here has a name.
    """
    paths = [lookup.without_slurm(name) for name in names] if names else lookup.runs()
    return [JobStatus(label_of(path), run_dir=path) for path in paths]


def _of_unlisted(run: Path, label: str) -> JobStatus:
    """Return the status of a run whose job Slurm has not listed among those of this user."""
    try:
        own = run.stat().st_uid == os.getuid()
    except OSError:
        own = False
    return JobStatus(label, run_dir=run, forgotten=bool(label) and own)


def listed(
    user_jobs: Sequence[slurm.QueuedJob] | None,
    env: Mapping[str, str],
    scripts: dict[str, str] | None = None,
) -> tuple[list[JobStatus], int]:
    """Return the status of the user's jobs, then of the newest other runs, the oldest first.

    Args:
        user_jobs: jobs of the user; None if Slurm does not answer.
        env: environment for Slurm's commands.
        scripts: as in `run_of`, for a process that calls this again and again.

    Returns:
        The status of each, and the number of older runs below ./runs.
    """
    statuses = [
        JobStatus(job.label, job, run_dir=run_of(job, env, False, scripts))
        for job in user_jobs or ()
    ]
    shown = {os.path.realpath(status.run_dir) for status in statuses if status.run_dir}
    others = [path for path in lookup.runs() if os.path.realpath(path) not in shown]
    others.sort(key=_changed)
    newest = others[-_MOST_RUNS:]
    for path in newest:
        label = label_of(path)
        unknown = user_jobs is None
        statuses.append(JobStatus(label, run_dir=path) if unknown else _of_unlisted(path, label))
    return statuses, len(others) - len(newest)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def named(
    name: str, user_jobs: Sequence[slurm.QueuedJob], env: Mapping[str, str]
) -> list[JobStatus]:
    """Return the status of the jobs or the run with a name, as in `lookup.find`.

    Raises:
        UsageError: no job or run has the name, or several have.
        NoAnswerError: Slurm did not answer.
    """
    try:
        found = lookup.find(name, user_jobs, env)
    except UsageError:
        if ended := slurm.ended(name, env):
            return [JobStatus(job.label, ended=job) for job in ended]
        if log_names.of_forgotten(name):  # it failed before its run began
            return [JobStatus(name, forgotten=True)]
        raise
    if found.jobs or found.run_dir is None:
        return [of_queued(job, env) for job in found.jobs]
    ended = slurm.ended(found.label, env)
    if len(ended) == 1:
        return [JobStatus(ended[0].label, ended=ended[0], run_dir=found.run_dir)]
    return [_of_unlisted(found.run_dir, found.label)]


def as_json(status: JobStatus, used: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the entry of `hpctrain status --json`; unknown values are None.

    Args:
        status: status of the job and of its run.
        used: entry about what it has used.
    """
    job, ended = status.queued, status.ended
    record = job or ended
    code = record.code if record else None
    return {
        "job": status.label or None,
        "state": record.state if record else None,
        "exit_code": None if job and (job.active or job.refused) else code,
        "name": job and job.name,
        "nodes": job.nodes or None if job else None,
        "hosts": job and _hosts(job.hosts),
        "restarts": job and job.restarts,
        "elapsed_seconds": slurm_seconds(job.used) if job and job.state != "PENDING" else None,
        "remaining_seconds": slurm_seconds(job.left) if job and job.active else None,
        "start_time": job and slurm_date(job.start),
        "submit_time": job and slurm_date(job.submitted),
        "dependency": job.dependency or None if job else None,
        "reason": (bare(job.reason) or None) if job else None,
        "explanation": (explained(job) or None) if job else None,
        "failure": status.failure or None,
        "log": os.path.abspath(status.log) if status.log else None,
        "run": _run(status, status.run_dir) if status.run_dir else None,
        "used": used,
    }


def _run(status: JobStatus, run_dir: Path) -> dict[str, Any]:
    recorded = status.progress or Progress()
    return {
        "path": os.path.abspath(run_dir),
        "status": status.run_status,
        "step": recorded.step,
        "epoch": None if recorded.epoch is None else recorded.epoch + 1,
        "loss": _finite(recorded.loss),
        "samples_per_second": _finite(recorded.speed),
        "reason": recorded.reason or None,
        "effective_training_time": recorded.effective and recorded.effective.as_json(),
    }


def _hosts(hosts: str) -> list[str] | None:
    try:
        return expand(hosts)
    except UsageError:
        return None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
