"""Run directories of jobs, and the progress of runs."""

import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.cluster import slurm

__all__ = ["Progress", "label_of", "progress", "run_of"]

# Bytes that are read from the end of metrics.jsonl: some hundred rows.
_TAIL = 2**16
# Limit for a summary, which takes some hundred bytes.
_MOST_BYTES = 2**20
# Steps and epochs are less than this.
_MOST = 2**63
# Number of newest run folders to search for a job without a folder of its name.
_MOST_RUNS = 300
# Run directory in scripts of `hpctrain render` and in the hand-written sbatch/preemptible.sh.
_SAID = re.compile(
    r"""^(?:run|(?:export\ )?HPCTRAIN_RUN_DIR)=
    (?:\$PWD/|"\$PWD"/|\$SLURM_SUBMIT_DIR/|"\$SLURM_SUBMIT_DIR"/)?
    (?P<path>.+?)
    (?P<task>/\$SLURM_ARRAY_TASK_ID|\$\{SLURM_ARRAY_TASK_ID:\+/\$SLURM_ARRAY_TASK_ID\})?$""",
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, as recorded in its directory.

    Attributes:
        path: run directory.
        status: done, stopped, failed or given-up; empty if the run has not ended.
        step, epoch, loss, speed: newest values; None if there are none. Speed in samples/s.
        metrics: last metrics by name: numbers and texts.
        reason: why the run ended, if that is recorded.
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
    """Return the progress of a run; None if there is no run."""
    directory = rundir.RunDirectory(path)
    # Here and below without pathlib, which raises if the user may not read a folder.
    if not os.path.exists(directory.identity) and not os.path.exists(directory.metrics):
        return None
    summary = _summary(directory)
    newest: dict[str, Any] = {}
    for row in _last_rows(directory.metrics):
        newest |= row
    metrics = summary.get("metrics")
    return Progress(
        path,
        _text(summary.get("status")),
        _number(summary.get("step", newest.get("step")), int),
        _number(newest.get("epoch"), int),
        _number(newest.get("loss"), float),
        _number(newest.get("samples_per_second"), float),
        {name: one for name, one in metrics.items() if isinstance(one, (str, int, float))}
        if isinstance(metrics, dict)
        else {},
        _text(summary.get("reason")),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        if kind is float:
            return float(value)
        return int(value) if abs(value) < _MOST and value == value // 1 else None
    except OverflowError:
        return None


def _summary(directory: rundir.RunDirectory) -> dict[str, Any]:
    text, whole = _end(directory.summary, _MOST_BYTES)
    return _object(text) if whole else {}


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of a .jsonl file, without invalid ones."""
    text, whole = _end(path, _TAIL)
    return [row for row in map(_object, text.splitlines()[0 if whole else 1 :]) if row]


def _end(path: Path, most: int) -> tuple[bytes, bool]:
    """Return the last bytes of a file, and whether they are all; empty if it cannot be read.

    The run may belong to another user, and the file may be a FIFO, which could block forever.
    """
    try:
        with open(path, "rb", opener=_opened) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return b"", True
            file.seek(max(0, facts.st_size - most))
            return file.read(most), facts.st_size <= most
    except (OSError, ValueError):
        return b"", True


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _object(text: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the text is not an object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def run_of(job: slurm.Job, env: Mapping[str, str], named: bool = True) -> Path | None:
    """Return the run directory of a job; None if it has none yet, or if it is unknown.

    Slurm is asked for the job's script only if there is no folder with the job's own name.

    Args:
        job: Slurm's record of the job.
        env: environment for Slurm's commands.
        named: whether the user has named the job. If not, Slurm is not asked for a job that has
            not started: a table may have many of them, and they could only have an earlier run.
    """
    if "[" in job.label:  # pending tasks of an array
        return None
    usual = Path(job.folder, "runs", f"{job.name.replace('/', '_')}-{job.label}")
    if os.path.isdir(usual):
        return usual
    if not named and job.word == "PENDING" and not job.restarts:
        return None
    try:
        said = _said(slurm.batch_script(job.number, env), job)
    except slurm.NoAnswerError:
        said = None
    # The job may continue the run of an earlier job: HPCTRAIN_RUN_DIR=… at its submission.
    return said if said and os.path.isdir(said) else _by_starts(Path(job.folder, "runs"), job.label)


def _said(script: str, job: slurm.Job) -> Path | None:
    """Return the run directory set in the script; None if only a shell could expand it."""
    match = _SAID.search(script)
    if not match or "$" in match["path"] or "`" in match["path"]:
        return None
    try:
        words = shlex.split(match["path"])
    except ValueError:
        return None
    # The index of a job outside of an array is "N/A".
    folder = job.task if match["task"] and job.task.isdigit() else ""
    return Path(job.folder, words[0], folder) if len(words) == 1 else None


def _by_starts(runs: Path, label: str) -> Path | None:
    """Return the newest run that this job was the last to start."""
    try:
        found = sorted(runs.iterdir(), key=_changed, reverse=True)
    except OSError:
        return None
    return next((path for path in found[:_MOST_RUNS] if _last_start(path) == label), None)


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
    if not all(isinstance(one, (str, int)) for one in parts):
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
