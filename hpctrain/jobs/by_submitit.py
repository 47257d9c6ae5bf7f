"""Functions and scripts as jobs of submitit on Slurm.

submitit sends the work to the ranks and collects their results. Slurm gets the script of
`script.render` instead of submitit's own script: with all fields of JobSpec, with its quoting, and
with its way to save, to requeue and to give up.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import function, job_paths, site, submission
from hpctrain.jobs.handle import Job
from hpctrain.jobs.job_store import JobRecord, new_folder
from hpctrain.jobs.spec import JobSpec
from hpctrain.process.logging import logger

try:
    import submitit
except ImportError as error:
    raise UsageError("HT812.no-submitit", error=error) from None

__all__ = ["send"]

# Fields that a job of submitit cannot have. None is dropped silently.
_OF_SCRIPTS = (
    *("command", "container", "stage_code", "stage_environment", "stage_data", "elastic", "spares"),
    *("requeue_plain", "array", "sweep"),
)


def send(
    train: Callable[..., Any] | str | os.PathLike[str],
    spec: JobSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    env: Mapping[str, str],
) -> Job:
    """Submit a function or a script; see `hpctrain.submit`.

    Raises:
        UsageError: the arguments are invalid, or cannot be pickled.
        StartError: Slurm does not accept the job.
    """
    work, title = _work(train, spec, args, kwargs)
    others = [name for name in _OF_SCRIPTS if getattr(spec, name)]
    others += ["launcher = none"] if spec.launcher == "none" else []
    if others:
        raise UsageError("HT811.unsupported-by-submitit", fields=", ".join(others))
    name = spec.name or re.sub(r"[^\w.-]", "_", title).strip("_")[:100] or "job"
    spec = site.completed(replace(spec, name=name), env)
    with new_folder() as folder:
        try:
            executor = _Executor(folder, spec, env)
        except RuntimeError as error:
            raise StartError("HT815.no-slurm-for-submitit", error=error) from None
        job_id = executor.submit(work).job_id
        run_dir = job_paths.run_directory(spec, job_id, None, env).absolute()
        record = JobRecord(folder, job_id, spec.ranks, run_dir)
        record.write()
    return Job(record)


def _work(
    train: Callable[..., Any] | str | os.PathLike[str],
    spec: JobSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[function.RankWork, str]:
    """Return the work of each rank, and a title for the job."""
    is_script = isinstance(train, (str, os.PathLike))
    known = callable(train) or (is_script and not kwargs)
    if not (known and isinstance(spec, JobSpec) and isinstance(args, (tuple, list))):
        raise UsageError(
            "HT813.invalid-submit-call", train=train, kind=type(spec), args=args, kwargs=kwargs
        )
    if callable(train):
        _check_arguments(train, args, kwargs)
        return function.pack(train, args, kwargs), getattr(train, "__name__", type(train).__name__)
    path = os.path.abspath(train)
    if not os.path.isfile(path):
        raise UsageError("HT805.no-script-to-submit", script=os.fspath(train))
    return function.pack(function.run_script, (path, *args), {}), Path(path).stem


def _check_arguments(
    train: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise UsageError if a function does not take its arguments, before the job is queued."""
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # such as a function written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        function = f"{getattr(train, '__name__', type(train).__name__)}{signature}"
        raise UsageError(
            "HT813.arguments-do-not-fit", function=function, args=args, kwargs=kwargs, error=error
        ) from None


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, with the script of a JobSpec.

    Args:
        folder: folder of the job.
        spec: complete description of the job.
        env: environment of this process.

    Raises:
        RuntimeError: this host has no srun.
    """

    def __init__(self, folder: Path, spec: JobSpec, env: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._spec, self._env = spec, env

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        """Submit the script that starts each rank; submitit's shell line `command` is not used."""
        del command
        spec, folder = self._spec, self.folder
        # The ranks use this Python, if the job has no environment of its own.
        python = "python" if spec.venv or spec.conda else sys.executable
        spec = replace(
            spec,
            command=(python, "-u", "-m", "submitit.core._submit", os.fspath(folder)),
            launcher="srun",  # each process of submitit is a task
            environment={**spec.environment, "SUBMITIT_EXECUTOR": "slurm"},
            output=spec.output or os.path.relpath(folder / "%j.log"),
        )
        job, notes = submission.send(spec, self._env)
        for note in notes:
            logger.warning("%s", note)
        tasks = list(range(spec.ranks))
        return submitit.SlurmJob(folder=folder, job_id=job, tasks=tasks)
