"""Where the runs of jobs are, and how far they have come."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import rundir, slurm

__all__ = ["Progress", "label_of", "progress", "run_of"]

# The end of metrics.jsonl that is read: some hundred rows.
_TAIL = 2**16
# Folders of runs that are looked into for a job that has none of its name, the newest.
_MOST_RUNS = 300
# As scripts of `hpctrain render`, and by hand as sbatch/preemptible.sh, have it.
_SAID = re.compile(r"^(?:run|(?:export )?HPCTRAIN_RUN)=(.+)$", re.MULTILINE)
_LABEL = re.compile(r"-(\d+(?:_\d+)?)\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run directory says.

    Attributes:
        path: of it.
        status: done, stopped, failed or given-up; empty where the run has not ended.
        step, epoch, loss, speed: the newest; None where it says nothing. Speed in samples/s.
        metrics: the last ones, by name.
        reason: why it ended, where it says so.
    """

    path: Path
    status: str = ""
    step: int | None = None
    epoch: int | None = None
    loss: float | None = None
    speed: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def progress(path: Path) -> Progress | None:
    """How far a run has come; None where there is no run."""
    directory = rundir.RunDirectory(path)
    if not directory.identity.exists() and not directory.metrics.exists():
        return None
    summary = _summary(directory)
    newest: dict[str, Any] = {}
    for row in _last_rows(directory.metrics):
        newest |= row
    metrics = summary.get("metrics")
    return Progress(
        path,
        str(summary.get("status", "")),
        _number(summary.get("step", newest.get("step")), int),
        _number(newest.get("epoch"), int),
        _number(newest.get("loss"), float),
        _number(newest.get("samples_per_second"), float),
        metrics if isinstance(metrics, dict) else {},
        str(summary.get("reason", "")),
    )


def _summary(directory: rundir.RunDirectory) -> dict[str, Any]:
    try:
        content = json.loads(directory.summary.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _number(value: Any, kind: type[Any]) -> Any:
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind(value) if right and (kind is float or value == value // 1) else None


def _last_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().splitlines()[1 if size > _TAIL else 0 :]
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def run_of(job: slurm.Job, env: Mapping[str, str]) -> Path | None:
    """The run directory of a job; None where it has none yet, or nobody knows which.

    Slurm is asked for the job's script only where there is none of the job's own name.
    """
    if "[" in job.label:  # tasks that wait
        return None
    usual = Path(job.folder, "runs", f"{job.name.replace('/', '_')}-{job.label}")
    if usual.is_dir():
        return usual
    try:
        said = _said(slurm.batch_script(job.number, env), job)
    except slurm.NoAnswerError:
        said = None
    # It may be that of an earlier job, which goes on: HPCTRAIN_RUN=… at its submission.
    return said if said and said.is_dir() else _by_starts(Path(job.folder, "runs"), job.label)


def _said(script: str, job: slurm.Job) -> Path | None:
    """What the script says, where that takes no shell to know."""
    match = _SAID.search(script)
    if not match:
        return None
    text = match[1].removeprefix("$PWD/").removeprefix('"$PWD"/')
    task = "/$SLURM_ARRAY_TASK_ID"
    folder = job.task if text.endswith(task) else ""
    text = text.removesuffix(task)
    if "$" in text or "`" in text:
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    return Path(job.folder, words[0], folder) if len(words) == 1 else None


def _by_starts(runs: Path, label: str) -> Path | None:
    """The run whose last start was this job's."""
    try:
        found = sorted(runs.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return None
    return next((path for path in found[:_MOST_RUNS] if _last_start(path) == label), None)


def _last_start(path: Path) -> str:
    rows = _last_rows(path / "starts.jsonl")
    job = rows[-1].get("job") if rows else None
    if not isinstance(job, dict):
        return ""
    task = job.get("array_task")
    return f"{job.get('array_job_id')}_{task}" if task is not None else str(job.get("job_id"))


def label_of(path: Path) -> str:
    """The job of a run directory: that of its last start, or of its name where it has had none.

    Nothing where it was no job's.
    """
    if (path / "starts.jsonl").exists():
        return _last_start(path)
    match = _LABEL.search(path.name)
    return match[1] if match else ""
