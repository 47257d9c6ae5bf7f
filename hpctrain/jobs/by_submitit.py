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

from hpctrain.cluster import env_vars
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import function, job_paths, site, submission
from hpctrain.jobs.handle import Job
from hpctrain.jobs.job_environment import is_below
from hpctrain.jobs.job_store import JobRecord, new_folder
from hpctrain.jobs.spec import JobSpec
from hpctrain.process.logging import logger

try:
    import submitit
except ImportError as error:
    raise UsageError(
        "HT812",
        f"submitit cannot be imported: {error}",
        "submitit, which carries functions to the ranks of a job",
        "pip install 'hpctrain[submit]'",
    ) from None

__all__ = ["send"]

# Fields that a job of submitit cannot have, and what to do instead. None is dropped silently.
_AS_SCRIPT = "hpctrain submit, which submits only a script"
_UNSUPPORTED = {
    "command": ("remove it: the function or script is the first argument",),
    "container": (_AS_SCRIPT,),
    "stage_code": (_AS_SCRIPT,),
    "stage_environment": (_AS_SCRIPT,),
    "stage_data": (_AS_SCRIPT,),
    "elastic": (_AS_SCRIPT,),
    "spares": (_AS_SCRIPT,),
    "requeue_plain": (_AS_SCRIPT,),
    "array": ("one submit() for each index", _AS_SCRIPT),
    "sweep": ("[hpctrain.submit(train, spec, kwargs=one) for one in …]", _AS_SCRIPT),
}


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
    _check(train, spec, args, kwargs)
    for name, instead in _UNSUPPORTED.items():
        if getattr(spec, name):
            found = f"{name} = {getattr(spec, name)!r} in a job of submitit"
            raise UsageError("HT811", found, "", *instead)
    if spec.launcher == "none":
        found = f"launcher = {spec.launcher!r} in a job of submitit"
        raise UsageError("HT811", found, "hpctrain, or srun", _AS_SCRIPT)
    work, title = _work(train, args, kwargs)
    name = spec.name or re.sub(r"[^\w.-]", "_", title).strip("_")[:100] or "job"
    spec = site.completed(replace(spec, name=name), env)
    python = _python(spec, env)
    with new_folder() as folder:
        try:
            executor = _Executor(folder, spec, env, python)
        except RuntimeError as error:
            raise StartError(
                "HT815",
                f"no Slurm here: {error}",
                "a host of the cluster",
                "hpctrain.spawn(FUNCTION, 2) starts ranks on this machine",
            ) from None
        job_id = executor.submit(work).job_id
        run_dir = job_paths.run_directory(spec, job_id, None, env).absolute()
        record = JobRecord(folder, job_id, spec.nodes * spec.tasks, run_dir, spec.title)
        record.write()
    return Job(record)


def _check(train: object, spec: object, args: object, kwargs: object) -> None:
    usage = "hpctrain.submit(FUNCTION, hpctrain.JobSpec(nodes=2), args=(…,))"
    is_script = isinstance(train, (str, os.PathLike))
    for valid, found, expected in (
        (
            callable(train) or is_script,
            f"submit({train!r}, …)",
            "a function, or the path of a script",
        ),
        (isinstance(spec, JobSpec), f"submit(…, {type(spec).__name__}, …)", "a hpctrain.JobSpec"),
        (
            isinstance(args, (tuple, list)),
            f"submit(…, args=…) with a {type(args).__name__}",
            "a tuple or list of arguments; with one argument args=(ARGUMENT,)",
        ),
        (not (is_script and kwargs), "submit(SCRIPT, kwargs=…)", "args=('--lr', 0.1) for a script"),
    ):
        if not valid:
            raise UsageError("HT813", found, expected, usage)


def _work(
    train: Callable[..., Any] | str | os.PathLike[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[function.RankWork, str]:
    """Return the work of each rank, and a title for the job."""
    if callable(train):
        _check_arguments(train, args, kwargs)
        return function.pack(train, args, kwargs), getattr(train, "__name__", type(train).__name__)
    path = os.path.abspath(train)
    if not os.path.isfile(path):
        raise UsageError(
            "HT805", f"there is no file {os.fspath(train)!r}", "the path of a Python script"
        )
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
        name = getattr(train, "__name__", type(train).__name__)
        raise UsageError(
            "HT813",
            f"{name}{signature} with args={args!r:.200} and kwargs={kwargs!r:.200}: {error}",
            "arguments that fit its signature",
        ) from None


def _python(spec: JobSpec, env: Mapping[str, str]) -> str:
    """Return the Python of the ranks: this one, if the job has no environment of its own.

    Raises:
        UsageError: this Python will be gone when the job runs.
    """
    if spec.venv or spec.conda:
        return "python"
    scratch = env.get(env_vars.SCRATCH, "")
    if scratch and is_below(scratch, sys.executable):
        raise UsageError(
            "HT805",
            f"{sys.executable} is a temporary copy of this job",
            "a Python that still exists when the next job runs",
            "JobSpec(venv=…)",
            "JobSpec(conda=…)",
        )
    return sys.executable


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, with the script of a JobSpec.

    Args:
        folder: folder of the job.
        spec: complete description of the job.
        env: environment of this process.
        python: Python of the ranks.

    Raises:
        RuntimeError: this host has no srun.
    """

    def __init__(self, folder: Path, spec: JobSpec, env: Mapping[str, str], python: str) -> None:
        super().__init__(folder)
        self._spec, self._env, self._program = spec, env, python

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        """Submit the script that starts each rank; submitit's shell line `command` is not used."""
        del command
        spec, folder = self._spec, self.folder
        spec = replace(
            spec,
            command=(self._program, "-u", "-m", "submitit.core._submit", os.fspath(folder)),
            launcher="srun",  # each process of submitit is a task
            environment={**spec.environment, "SUBMITIT_EXECUTOR": "slurm"},
            output=spec.output or os.path.relpath(folder / "%j.log"),
        )
        submitted = submission.send(spec, self._env)
        for note in submitted.notes:
            logger.warning("%s", note)
        tasks = list(range(spec.nodes * spec.tasks))
        return submitit.SlurmJob(folder=folder, job_id=submitted.job, tasks=tasks)
