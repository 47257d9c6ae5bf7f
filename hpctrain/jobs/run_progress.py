"""Run directories of jobs, and the progress of runs."""

import contextlib
import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import rundir
from hpctrain.cluster import slurm

if TYPE_CHECKING:
    from hpctrain.rundir.effective_time import EffectiveTime

__all__ = ["Progress", "end_of", "label_of", "progress", "run_of"]

# Bytes that are read from the end of metrics.jsonl: some hundred rows.
_TAIL = 2**16
# Limit for a summary, which takes some hundred bytes.
_MOST_BYTES = 2**20
# Steps and epochs are less than this.
_LIMIT = 2**63
# Number of newest run folders to search for a job without a folder of its name.
_MOST_RUNS = 300
# In a script, a run directory, and what may stand before and after it.
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?HPCTRAIN_RUN_DIR=")
_RUN_DIR = re.compile(
    r"(?:\$(?:PWD|SLURM_SUBMIT_DIR)/)?(?P<path>[^$`]+?)(?P<task>/\$SLURM_ARRAY_TASK_ID)?\Z"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, as recorded in its directory.

    Attributes:
        path: run directory.
        status: done, stopped, failed or given-up; empty if the run has not ended.
        step, epoch, loss, speed: newest values; None if there are none. Speed in samples/s.
        reason: why the run ended, if that is recorded.
        effective: where the time of the run went; None if that is not recorded.
    """

    path: Path
    status: str = ""
    step: int | None = None
    epoch: int | None = None
    loss: float | None = None
    speed: float | None = None
    reason: str = ""
    effective: "EffectiveTime | None" = None


def progress(path: Path) -> Progress | None:
    """Return the progress of a run; None if there is no run."""
    directory = rundir.RunDirectory(path)
    # Here and below without pathlib, which raises if the user may not read a folder.
    if not os.path.exists(directory.identity) and not os.path.exists(directory.metrics):
        return None
    summary = _summary(directory)
    newest: dict[str, Any] = {}
    for row in _last_rows(directory.metrics):
        newest |= row
    return Progress(
        path,
        _text(summary.get("status")),
        _number(summary.get("step", newest.get("step")), int),
        _number(newest.get("epoch"), int),
        _number(newest.get("loss"), float),
        _number(newest.get("samples_per_second"), float),
        _text(summary.get("reason")),
        _effective(directory),
    )


def _effective(directory: rundir.RunDirectory) -> "EffectiveTime | None":
    from hpctrain.rundir.effective_time import measure

    try:
        return measure(directory)
    except OSError:  # the run of another user
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        if kind is float:
            return float(value)
        return int(value) if abs(value) < _LIMIT and value == value // 1 else None
    except OverflowError:
        return None


def _summary(directory: rundir.RunDirectory) -> dict[str, Any]:
    text, complete = end_of(directory.summary, _MOST_BYTES)
    return _object(text) if complete else {}


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of a .jsonl file, without invalid ones."""
    text, complete = end_of(path, _TAIL)
    return [row for row in map(_object, text.splitlines()[0 if complete else 1 :]) if row]


def end_of(path: Path, limit: int) -> tuple[bytes, bool]:
    """Return the last bytes of a file, and whether they are all; empty if it cannot be read.

    The run may belong to another user, and the file may be a FIFO, which could block forever.
    """
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return b"", True
            file.seek(max(0, status.st_size - limit))
            return file.read(limit), status.st_size <= limit
    except (OSError, ValueError):
        return b"", True


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _object(text: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the text is not an object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def run_of(job: slurm.QueuedJob, env: Mapping[str, str], named: bool = True) -> Path | None:
    """Return the run directory of a job; None if it has none yet, or if it is unknown.

    The job's script is requested from Slurm only if no folder has the name of the job.

    Args:
        job: Slurm's record of the job.
        env: environment for Slurm's commands.
        named: whether the user has named the job. If not, Slurm is not queried for a job that has
            not started: a table may have many of them, and they could only have an earlier run.
    """
    if "[" in job.label:  # pending tasks of an array
        return None
    default = Path(job.folder, "runs", f"{job.name.replace('/', '_')}-{job.label}")
    if os.path.isdir(default):
        return default
    if not named and job.state == "PENDING" and not job.restarts:
        return None
    try:
        path = _from_script(slurm.batch_script(job.number, env), job)
    except slurm.NoAnswerError:
        path = None
    # The job may continue the run of an earlier job: HPCTRAIN_RUN_DIR=… at its submission.
    return (
        path if path and os.path.isdir(path) else _from_starts(Path(job.folder, "runs"), job.label)
    )


def _from_script(script: str, job: slurm.QueuedJob) -> Path | None:
    """Return the run directory set in the script; None if only a shell could expand it."""
    for line in script.replace("\\\n", " ").splitlines():
        option = _ASSIGNED.sub("--run-dir=", line)
        if "--run-dir" not in option:
            continue
        with contextlib.suppress(ValueError):  # no words of a shell
            match = _RUN_DIR.match(rundir.given(shlex.split(option, comments=True)))
            if match:
                path = Path(job.folder, match["path"])
                # `hpctrain run --run-dir` adds the index itself; without an array it is "N/A".
                task = path / job.task if job.task.isdigit() else path
                return task if match["task"] or os.path.isdir(task) else path
    return None


def _from_starts(runs: Path, label: str) -> Path | None:
    """Return the newest run that this job was the last to start."""
    try:
        paths = sorted(runs.iterdir(), key=_changed, reverse=True)
    except OSError:
        return None
    return next((path for path in paths[:_MOST_RUNS] if _last_start(path) == label), None)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_start(path: Path) -> str:
    rows = _last_rows(path / "starts.jsonl")
    job = rows[-1].get("job") if rows else None
    if not isinstance(job, dict):
        return ""
    task = job.get("array_task")
    parts = [job.get("job_id")] if task is None else [job.get("array_job_id"), task]
    if not all(isinstance(part, (str, int)) for part in parts):
        return ""
    label = "_".join(map(str, parts))
    return label if slurm.is_label(label) else ""


def label_of(path: Path) -> str:
    """Return the job of a run directory: from its last start, or without starts from its name.

    Empty if no job has run there.
    """
    if os.path.exists(path / "starts.jsonl"):
        return _last_start(path)
    _, dash, label = path.name.rpartition("-")
    return label if dash and slurm.is_label(label) else ""
