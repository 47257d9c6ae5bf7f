"""Lookup of a run or a job by a number, a run directory, or the job's name."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs.run_progress import label_of, progress, run_of
from hpctrain.jobs.slurm_reasons import plain

__all__ = ["Named", "named", "own_jobs", "runs"]


@dataclass(frozen=True, slots=True)
class Named:
    """Job or run that a word names.

    Attributes:
        word: word as the user typed it.
        label: label of the job, or of the whole array if the word names that; may be empty.
        jobs: Slurm's records of the job; several are tasks of one array.
        run_dir: run directory, if the word names one.
    """

    word: str
    label: str
    jobs: tuple[slurm.Job, ...]
    run_dir: Path | None = None


def named(
    word: str, mine: Sequence[slurm.Job], env: Mapping[str, str], living: bool = False
) -> Named:
    """Return the job or run that a word names.

    Args:
        word: JOBID, JOBID_TASK, a run directory by its path or by its name below runs, or the name
            of a job.
        mine: the user's own jobs.
        env: environment for Slurm's commands, which look up a number.
        living: whether jobs that have not ended come first, if several jobs have the name.

    Raises:
        UsageError: no job or run has the name, or several have; the message lists candidates.
        NoAnswerError: Slurm was asked and did not answer.
    """
    if slurm.is_label(word):
        found = slurm.jobs(env, [word])
        if found:
            return Named(word, word, tuple(found))
    if path := _run(word):
        label = label_of(path)
        # The name alone proves nothing: any run may have the name exp-3.
        known = [job for job in mine if job.label == label and _is(run_of(job, env), path)]
        return Named(word, label, tuple(known), path)
    found = [job for job in mine if job.name == word]
    labels = _labels(found)
    if living and len(labels) > 1:
        found = [job for job in found if job.lives] or found
        labels = _labels(found)
    if len(labels) == 1:
        return Named(word, labels.pop(), tuple(found))
    if found:
        raise UsageError(
            "HT818",
            f"{plain(word)!r} is the name of {len(labels)} jobs",
            "one of " + ", ".join(f"{job.label} ({plain(job.word)})" for job in found),
            "its number in place of its name",
        )
    raise UsageError("HT818", f"{plain(word)!r} is neither a job nor a run here", _candidates(mine))


def _labels(jobs: Sequence[slurm.Job]) -> set[str]:
    return {job.array if job.task != "N/A" else job.label for job in jobs}


def _run(word: str) -> Path | None:
    """Return the run directory of a word; a number means the only run whose name ends in it."""
    for path in (Path(word), Path("runs", word)):
        if word and os.path.isdir(path) and (progress(path) or label_of(path)):
            return path
    ends = [one for one in runs() if slurm.is_label(word) and one.name.endswith(f"-{word}")]
    return ends[0] if len(ends) == 1 else None


def runs() -> list[Path]:
    """Return the folders below ./runs, sorted."""
    try:
        return sorted(path for path in Path("runs").iterdir() if os.path.isdir(path))
    except OSError:
        return []


def _is(one: Path | None, other: Path) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)


def own_jobs(words: Sequence[str], env: Mapping[str, str], living: bool = False) -> list[Named]:
    """Return the user's own jobs in Slurm for some words; all of them, or an error.

    Args:
        words, env, living: as in `named`; the result has an entry for each word.

    Raises:
        UsageError: as in `named`; or Slurm has no record of a job, or another user owns one.
        StartError: this host has no Slurm, or Slurm does not answer.
    """
    said = ", ".join(plain(word) for word in words)
    try:
        mine = slurm.jobs(env, uid=os.getuid())
        return [_own(named(word, mine, env, living), mine) for word in words]
    except slurm.NoAnswerError as error:
        if shutil.which("squeue", path=env.get("PATH", os.defpath)) is None:
            raise StartError(
                "HT815",
                f"{said}: there is no Slurm on this host (no squeue on the PATH)",
                "a login host of the cluster",
            ) from None
        raise StartError(
            "HT816", f"{said}: nothing is done, as {error}", "an answer of Slurm's"
        ) from None


def _own(one: Named, mine: Sequence[slurm.Job]) -> Named:
    if not one.jobs and one.label in [job.label for job in mine]:
        raise UsageError(
            "HT819", f"{plain(one.word)} is not the run of job {one.label}, which has another one",
            "the job's own run, or its number", f"hpctrain status {one.label}",
        )  # fmt: skip
    if not one.jobs:
        what = f"job {one.label}" if one.label else "no job"
        raise UsageError(
            "HT819",
            f"{plain(one.word)} is the run of {what}, which Slurm does not know (any more)",
            "a job that waits, runs, or has ended lately",
            f"hpctrain submit … --run-dir {plain(str(one.run_dir))} -- … --resume "
            "(goes on with the run)",
        )
    if others := [job for job in one.jobs if job.uid != str(os.getuid())]:
        raise UsageError(
            "HT820", f"job {one.label} is {plain(others[0].user)}'s", "a job of your own"
        )
    return one


def _candidates(mine: Sequence[slurm.Job]) -> str:
    jobs = [f"{job.label} ({plain(job.name)})" for job in mine if job.lives]
    shown = jobs[:20] + [plain(str(path)) for path in runs()[-20:]]
    return f"one of {', '.join(shown)}" if shown else "a job's number; you have no jobs"
