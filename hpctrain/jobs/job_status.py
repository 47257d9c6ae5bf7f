"""Status of a job and of its run, found by a number, a run directory, or the job's name."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.cluster import slurm
from hpctrain.cluster.hostlist import expand
from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.jobs import job_facts, log_names
from hpctrain.jobs.job_facts import Progress, bare, explained, label_of, last_job, progress, run_of
from hpctrain.jobs.units import slurm_date, slurm_seconds
from hpctrain.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class Named:
    """Job or run with a given name.

    Attributes:
        name: name as the user typed it.
        label: label of the job, or of the whole array if that was named; may be empty.
        jobs: Slurm's records of the job; several are tasks of one array.
        run_dir: run directory, if one was named.
    """

    name: str
    label: str
    jobs: tuple[slurm.QueuedJob, ...]
    run_dir: Path | None = None


def find(
    name: str,
    user_jobs: Sequence[slurm.QueuedJob],
    env: Mapping[str, str],
    active_first: bool = False,
) -> Named:
    """Return the job or run with a name.

    Args:
        name: JOBID, JOBID_TASK, a run directory by its path or by its name below runs, or the name
            of a job.
        user_jobs: the user's own jobs.
        env: environment for Slurm's commands, which look up a number.
        active_first: whether ended jobs with the name of a job do not count if others go on.

    Raises:
        UsageError: no job or run has the name, or several have; the message lists candidates.
        NoAnswerError: Slurm did not answer.
    """
    if slurm.is_label(name):
        jobs = slurm.jobs(env, [name])
        if jobs:
            return Named(name, name, tuple(jobs))
    if path := _run(name):
        label = label_of(path)
        # The name alone proves nothing: any run may have the name exp-3.
        run_jobs = [
            job for job in user_jobs if job.label == label and _same_folder(run_of(job, env), path)
        ]
        return Named(name, label, tuple(run_jobs), path)
    jobs = [job for job in user_jobs if job.name == name]
    if active_first:
        jobs = [job for job in jobs if job.active] or jobs
    labels = {job.array if job.task != "N/A" else job.label for job in jobs}
    if len(labels) == 1:
        return Named(name, labels.pop(), tuple(jobs))
    if jobs:
        known = ", ".join(f"{job.label} ({printable(job.state)})" for job in jobs)
        raise UsageError("HT818.several-jobs-with-name", name=name, jobs=known)
    raise UsageError("HT818.no-such-job", name=name, candidates=_candidates(user_jobs))


def run_of_name(name: str) -> Path:
    """Return the run directory of a name, where Slurm cannot be asked.

    Raises:
        UsageError: no run here has the name.
    """
    if path := _run(name):
        return path
    known = ", ".join(printable(path) for path in runs()[-20:])
    raise UsageError("HT818.no-such-run", name=name, runs=known or "there are none")


def run_directory(name: str, env: Mapping[str, str]) -> Path:
    """Return the run directory of a folder, a run below ./runs, a job's number or a job's name.

    Slurm is asked only if no folder has the name. A path with a slash may also be missing.

    Raises:
        UsageError: no run has the name, or several have.
    """
    if os.sep in name or os.path.exists(name):
        return Path(name)
    if path := _run(name):
        return path
    try:
        jobs = find(name, slurm.jobs(env, uid=os.getuid()), env).jobs
    except slurm.NoAnswerError:
        return run_of_name(name)
    found = {path for path in (run_of(job, env) for job in jobs) if path}
    if len(found) != 1:
        several = ", ".join(sorted(map(printable, found))) or "none"
        raise UsageError("HT818.not-one-run", name=printable(name), runs=several)
    return found.pop()


def run_directories(name: str, env: Mapping[str, str]) -> list[Path]:
    """Return the run directories of a name, as `run_directory`; of an array, those of its tasks.

    Raises:
        UsageError: as for `run_directory`.
    """
    if slurm.is_label(name) and not _run(name):
        tasks = {path: path.name.rpartition(f"-{name}_")[2] for path in runs()}
        found = [path for path, task in tasks.items() if task.isdigit() and task != path.name]
        if found:
            return sorted(found, key=lambda path: int(tasks[path]))
    return [run_directory(name, env)]


def only_run(name: str, env: Mapping[str, str]) -> RunDirectory:
    """Return the run of a name, as `run_directory`; a folder may have one named run.

    Raises:
        UsageError: as for `run_directory`, or the folder has several runs.
    """
    directory = RunDirectory(run_directory(name, env))
    runs = directory.runs()
    if len(runs) > 1 and runs[0].path != directory.path:
        raise directory.missing()
    return runs[0] if runs else directory


def _run(name: str) -> Path | None:
    """Return the run directory of a name; a number means the only run whose name ends with it."""
    for path in (Path(name), Path("runs", name)):
        if name and os.path.isdir(path) and (progress(path) or label_of(path)):
            return path
    matches = [
        folder for folder in runs() if slurm.is_label(name) and folder.name.endswith(f"-{name}")
    ]
    return matches[0] if len(matches) == 1 else None


def runs() -> list[Path]:
    """Return the folders below ./runs, sorted, but for hidden ones."""
    try:
        found = (path for path in Path("runs").iterdir() if not path.name.startswith("."))
        return sorted(path for path in found if os.path.isdir(path))
    except OSError:
        return []


def _same_folder(path: Path | None, other: Path) -> bool:
    return path is not None and os.path.realpath(path) == os.path.realpath(other)


def own_jobs(
    names: Sequence[str], env: Mapping[str, str], active_first: bool = False
) -> list[Named]:
    """Return the user's own jobs in Slurm by their names; all of them, or an error.

    Args:
        names, env, active_first: as in `find`; the result has an entry for each name.

    Raises:
        UsageError: as in `find`; or Slurm has no record of a job, or another user owns one.
        StartError: this host has no Slurm, or Slurm does not answer.
    """
    text = ", ".join(printable(name) for name in names)
    try:
        user_jobs = slurm.jobs(env, uid=os.getuid())
        return [_check_owned(find(name, user_jobs, env, active_first)) for name in names]
    except slurm.NoAnswerError as error:
        raise slurm.absent(f"{text}: nothing was changed: {error}") from None


def _check_owned(named: Named) -> Named:
    if not named.jobs:
        name, run_dir = printable(named.name), printable(named.run_dir)
        label = named.label or "none"
        raise UsageError("HT819.run-without-job", name=name, label=label, run_dir=run_dir)
    if others := [job for job in named.jobs if job.uid != str(os.getuid())]:
        user = printable(others[0].user)
        raise UsageError("HT820.job-of-another-user", named=named, user=user)
    return named


def _candidates(user_jobs: Sequence[slurm.QueuedJob]) -> str:
    jobs = [f"{job.label} ({printable(job.name)})" for job in user_jobs if job.active]
    candidates = jobs[:20] + [printable(path) for path in runs()[-20:]]
    return ", ".join(candidates) or "there are none"


# --- status

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
        return self.run_status in (*job_facts.FAILED, INTERRUPTED, NEVER_BEGAN)

    @property
    def stopped(self) -> bool:
        """Whether the job was stopped, and not started again; for Slurm it has failed."""
        record = self.queued or self.ended
        return record is not None and job_facts.state_text(record.state, record.code) == "stopped"

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
        return job_facts.cause(self.progress, self.log, code, by_itself)


def of_queued(job: slurm.QueuedJob, env: Mapping[str, str]) -> JobStatus:
    """Return the status of a job in the controller's list."""
    return JobStatus(job.label, job, run_dir=run_of(job, env))


def without_slurm(names: Sequence[str]) -> list[JobStatus]:
    """Return the status of the named runs, or of all below ./runs, from their directories only.

    Raises:
        UsageError: no run here has a name.
    """
    paths = [run_of_name(name) for name in names] if names else runs()
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
    others = [path for path in runs() if os.path.realpath(path) not in shown]
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
    """Return the status of the jobs or the run with a name, as in `find`.

    Raises:
        UsageError: no job or run has the name, or several have.
        NoAnswerError: Slurm did not answer.
    """
    try:
        found = find(name, user_jobs, env)
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
        "run": _run_as_json(status, status.run_dir) if status.run_dir else None,
        "used": used,
    }


def _run_as_json(status: JobStatus, run_dir: Path) -> dict[str, Any]:
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
