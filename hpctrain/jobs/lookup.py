"""Lookup of a run or a job by a number, a run directory, or the job's name."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.jobs.run_progress import label_of, progress, run_of
from hpctrain.jobs.slurm_reasons import absent
from hpctrain.rundir import RunDirectory

__all__ = [
    "Named",
    "find",
    "only_run",
    "own_jobs",
    "run_directories",
    "run_directory",
    "runs",
    "without_slurm",
]


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


def without_slurm(name: str) -> Path:
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
        return without_slurm(name)
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
        raise absent(f"{text}: nothing was changed: {error}") from None


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
