"""Where the runs of jobs are, and how far they have come."""

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

# The end of metrics.jsonl that is read: some hundred rows.
_TAIL = 2**16
# A summary takes some hundred bytes.
_MOST_BYTES = 2**20
# Steps and epochs are less.
_MOST = 2**63
# Folders of runs that are looked into for a job that has none of its name, the newest.
_MOST_RUNS = 300
# As scripts of `hpctrain render`, and by hand as sbatch/preemptible.sh, have it.
_SAID = re.compile(
    r"""^(?:run|(?:export\ )?HPCTRAIN_RUN)=
    (?:\$PWD/|"\$PWD"/|\$SLURM_SUBMIT_DIR/|"\$SLURM_SUBMIT_DIR"/)?
    (?P<path>.+?)
    (?P<task>/\$SLURM_ARRAY_TASK_ID|\$\{SLURM_ARRAY_TASK_ID:\+/\$SLURM_ARRAY_TASK_ID\})?$""",
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run directory says.

    Attributes:
        path: of it.
        status: done, stopped, failed or given-up; empty where the run has not ended.
        step, epoch, loss, speed: the newest; None where it says nothing. Speed in samples/s.
        metrics: the last ones, by name: numbers and texts.
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
    # Not by pathlib, here and below, which raises where a folder is closed to others.
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
    """The last rows of a .jsonl file; those that are none are left out."""
    text, whole = _end(path, _TAIL)
    return [row for row in map(_object, text.splitlines()[0 if whole else 1 :]) if row]


def _end(path: Path, most: int) -> tuple[bytes, bool]:
    """The last bytes of a file, and whether they are all; none where it cannot be read.

    The run may be somebody else's, and the file a FIFO, for which one would wait for ever.
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
    """A JSON object; an empty one where the text is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def run_of(job: slurm.Job, env: Mapping[str, str], named: bool = True) -> Path | None:
    """The run directory of a job; None where it has none yet, or nobody knows which.

    Slurm is asked for the job's script only where there is none of the job's own name.

    Args:
        job: which.
        env: to ask Slurm.
        named: whether a person has named the job. For a table of many that have not started, each
            with such a question, Slurm is not asked: theirs could only be an earlier job's.
    """
    if "[" in job.label:  # tasks that wait
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
    # It may be that of an earlier job, which goes on: HPCTRAIN_RUN=… at its submission.
    return said if said and os.path.isdir(said) else _by_starts(Path(job.folder, "runs"), job.label)


def _said(script: str, job: slurm.Job) -> Path | None:
    """What the script says, where that takes no shell to know."""
    match = _SAID.search(script)
    if not match or "$" in match["path"] or "`" in match["path"]:
        return None
    try:
        words = shlex.split(match["path"])
    except ValueError:
        return None
    # The index of a job that is none of an array is "N/A".
    folder = job.task if match["task"] and job.task.isdigit() else ""
    return Path(job.folder, words[0], folder) if len(words) == 1 else None


def _by_starts(runs: Path, label: str) -> Path | None:
    """The run whose last start was this job's."""
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
    """The job of a run directory: that of its last start, or of its name where it has had none.

    Nothing where it was no job's.
    """
    if os.path.exists(path / "starts.jsonl"):
        return _last_start(path)
    _, dash, label = path.name.rpartition("-")
    return label if dash and slurm.is_label(label) else ""
