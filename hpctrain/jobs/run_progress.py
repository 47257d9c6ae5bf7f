"""Run directories of jobs, and the progress of runs."""

import contextlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import rundir
from hpctrain.cluster import slurm

if TYPE_CHECKING:
    from hpctrain.rundir.effective_time import EffectiveTime

__all__ = [
    "Progress",
    "curves",
    "end_of",
    "label_of",
    "last_job",
    "last_start",
    "progress",
    "run_of",
]

# Bytes that are read from the end of a file: some hundred rows of metrics.jsonl.
_TAIL = 2**16
# Number of newest run folders to search for a job without a folder of its name.
_MOST_RUNS = 300
# A line of a script that sets the run directory.
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?HPCTRAIN_RUN_DIR=")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, as recorded in its directory.

    Attributes:
        status: done, stopped, failed or given-up; empty if the run has not ended.
        step, epoch, loss, speed: newest values; None if there are none. Speed in samples/s.
        end, left: steps of the whole run, and estimated seconds to its end, while it trains; None
            if they are unknown.
        reason: why the run ended, if that is recorded.
        effective: where the time of the run went; None if that is not recorded.
    """

    status: str = ""
    step: int | None = None
    epoch: int | None = None
    loss: float | None = None
    speed: float | None = None
    end: int | None = None
    left: float | None = None
    reason: str = ""
    effective: "EffectiveTime | None" = None


def progress(path: Path) -> Progress | None:
    """Return the progress of a run, of several the one launched last; None if there is no run."""
    directory = rundir.RunDirectory(path).current()
    # Here and below without pathlib, which raises if the user may not read a folder.
    if not os.path.exists(directory.identity) and not os.path.exists(directory.metrics):
        return None
    summary = rundir.json_object(end_of(directory.summary))
    newest: dict[str, Any] = {}
    for row in _last_rows(directory.metrics):
        newest |= row
    last = rundir.json_object(end_of(directory.last_step))
    return Progress(
        _text(summary.get("status")),
        _number(summary.get("step", newest.get("step")), int),
        _number(newest.get("epoch"), int),
        _number(newest.get("loss"), float),
        _number(newest.get("samples_per_second"), float),
        _number(last.get("end"), int),
        _number(last.get("left"), float),
        _text(summary.get("reason")),
        _effective(directory),
    )


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
        return kind(value)
    except (OverflowError, ValueError):  # such as the integer of infinity
        return None


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of a .jsonl file, without invalid ones."""
    return [*filter(None, map(rundir.json_object, end_of(path).splitlines()))]


def end_of(path: Path) -> bytes:
    """Return the last bytes of a file; empty if it cannot be read: it may be of another user."""
    try:
        with open(path, "rb", opener=rundir.open_regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read(_TAIL)
    except (OSError, ValueError):
        return b""


def run_of(
    job: slurm.QueuedJob,
    env: Mapping[str, str],
    named: bool = True,
    scripts: dict[str, str] | None = None,
) -> Path | None:
    """Return the run directory of a job; None if it has none yet, or if it is unknown.

    The job's script is requested from Slurm only if no folder has the name of the job.

    Args:
        job: Slurm's record of the job.
        env: environment for Slurm's commands.
        named: whether the user has named the job. If not, Slurm is not queried for a job that has
            not started: a table may have many of them, and they could only have an earlier run.
        scripts: batch scripts by the numbers of jobs, as found so far; new ones are added.
    """
    scripts = {} if scripts is None else scripts
    if "[" in job.label:  # pending tasks of an array
        return None
    default = Path(job.folder, "runs", f"{job.name.replace('/', '_')}-{job.label}")
    if os.path.isdir(default):
        return default
    if not named and job.state == "PENDING" and not job.restarts:
        return None
    if job.number not in scripts:
        scripts[job.number] = ""
        with contextlib.suppress(slurm.NoAnswerError):
            scripts[job.number] = slurm.batch_script(job.number, env)
    path = _from_script(scripts[job.number], job)
    # The job may continue the run of an earlier job: HPCTRAIN_RUN_DIR=… at its submission.
    return (
        path if path and os.path.isdir(path) else _from_starts(Path(job.folder, "runs"), job.label)
    )


def _from_script(script: str, job: slurm.QueuedJob) -> Path | None:
    """Return the run directory set in the script; None if only a shell could expand it."""
    for line in script.replace("\\\n", " ").splitlines():
        with contextlib.suppress(ValueError):  # no words of a shell
            words = shlex.split(_ASSIGNED.sub("--run-dir=", line), comments=True)
            given = rundir.given(words)
            if given and not {"$", "`"} & {*given}:
                # `hpctrain run --run-dir` adds the index itself; without an array it is "N/A".
                path, task = Path(job.folder, given), Path(job.folder, given, job.task)
                return task if os.path.isdir(task) else path
    return None


def _from_starts(runs: Path, label: str) -> Path | None:
    """Return the newest run that this job was the last to start."""
    found = [*runs.glob("*/starts.jsonl"), *runs.glob("*/*/starts.jsonl")]
    for file in sorted(found, key=os.path.getmtime, reverse=True)[:_MOST_RUNS]:
        if last_job(file.parent) == label:
            return runs / file.relative_to(runs).parts[0]
    return None


def last_start(path: Path) -> dict[str, Any]:
    """Return the newest line of the starts.jsonl of a run; empty if there is none.

    Of several runs in the folder, that of the one launched last.
    """
    rows = _last_rows(rundir.RunDirectory(path).current().starts)
    return rows[-1] if rows else {}


def last_job(path: Path) -> str:
    """Return the label of the job that was the last to start a run; empty for no job of Slurm."""
    job = last_start(path).get("job")
    if not isinstance(job, dict):
        return ""
    task = job.get("array_task")
    label = f"{job.get('job_id')}" if task is None else f"{job.get('array_job_id')}_{task}"
    return label if slurm.is_label(label) else ""


def label_of(path: Path) -> str:
    """Return the job of a run directory: from its last start, or without starts from its name.

    Empty if no job has run there.
    """
    if os.path.exists(rundir.RunDirectory(path).current().starts):
        return last_job(path)
    _, dash, label = path.name.rpartition("-")
    return label if dash and slurm.is_label(label) else ""
