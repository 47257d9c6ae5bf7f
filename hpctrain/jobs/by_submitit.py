"""Functions and scripts as jobs of submitit: on Slurm, on this machine, or in this process.

submitit sends the work to the ranks and collects their results. Slurm gets the script of
`script.render` instead of submitit's own script: with all fields of JobSpec, with its quoting, and
with its way to save, to requeue and to give up.
"""

import contextlib
import inspect
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.cluster import env_vars, visible_gpus
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import function, site, submission, units
from hpctrain.jobs.function import RankWork
from hpctrain.jobs.handle import DebugJob, Job, LocalJob
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

# Time limit of a local job without one, as submitit requires it.
_MOST_SECONDS = 10 * 365 * 86400

# Fields that a job of submitit cannot have, and what to do instead. None is dropped silently.
_AS_SCRIPT = "hpctrain submit, which submits only a script"
_UNSUPPORTED = {
    "command": ("remove it: the function or script is the first argument",),
    "container": (_AS_SCRIPT,),
    "stage_code": (_AS_SCRIPT,),
    "stage_environment": (_AS_SCRIPT,),
    "stage_data": (_AS_SCRIPT,),
    "elastic": (_AS_SCRIPT,),
    "requeue_plain": (_AS_SCRIPT,),
    "array": ("one submit() for each index", _AS_SCRIPT),
    "sweep": ("[hpctrain.submit(train, spec, kwargs=one) for one in …]", _AS_SCRIPT),
}
# Fields that a batch script would apply before the ranks start.
_SET_UP_OUTSIDE = ("set it up before this process starts", "via='slurm'")
_UNSUPPORTED_LOCALLY = {
    "modules": _SET_UP_OUTSIDE,
    "setup": _SET_UP_OUTSIDE,
    "conda": _SET_UP_OUTSIDE,
    "dependency": ("remove it, and wait for the other job's result()",),
}


def send(
    train: Callable[..., Any] | str | os.PathLike[str],
    spec: JobSpec,
    via: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    env: Mapping[str, str],
) -> Job:
    """Submit a function or a script; see `hpctrain.submit`.

    Raises:
        UsageError: the arguments are invalid, or cannot be pickled.
        StartError: Slurm does not accept the job.
    """
    _check(train, spec, via, args, kwargs)
    _refuse(spec, _UNSUPPORTED)
    if callable(train):
        _check_arguments(train, args, kwargs)
        work = function.pack(train, args, kwargs)
        title = getattr(train, "__name__", type(train).__name__)
    else:
        path = os.path.abspath(train)
        if not os.path.isfile(path):
            raise UsageError(
                "HT805", f"there is no file {os.fspath(train)!r}", "the path of a Python script"
            )
        work, title = function.pack(function.run_script, (path, *args), {}), Path(path).stem
    name = spec.name or re.sub(r"[^\w.-]", "_", title).strip("_")[:100] or "job"
    return _VIA[via](work, replace(spec, name=name), env)


def _check(train: object, spec: object, via: object, args: object, kwargs: object) -> None:
    usage = "hpctrain.submit(FUNCTION, hpctrain.JobSpec(nodes=2), args=(…,))"
    is_script = isinstance(train, (str, os.PathLike))
    for valid, found, expected in (
        (
            callable(train) or is_script,
            f"submit({train!r}, …)",
            "a function, or the path of a script",
        ),
        (isinstance(spec, JobSpec), f"submit(…, {type(spec).__name__}, …)", "a hpctrain.JobSpec"),
        (via in _VIA, f"submit(…, via={via!r})", f"one of {', '.join(_VIA)}"),
        (
            isinstance(args, (tuple, list)),
            f"submit(…, args=…) with a {type(args).__name__}",
            "a tuple or list of arguments; with one argument args=(ARGUMENT,)",
        ),
        (not (is_script and kwargs), "submit(SCRIPT, kwargs=…)", "args=('--lr', 0.1) for a script"),
    ):
        if not valid:
            raise UsageError("HT813", found, expected, usage)


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


def _refuse(spec: JobSpec, fields: Mapping[str, tuple[str, ...]]) -> None:
    """Raise UsageError if a spec has one of these fields, with what to do instead."""
    for name, instead in fields.items():
        if getattr(spec, name):
            raise UsageError(
                "HT811", f"{name} = {getattr(spec, name)!r} in a job of submitit", "", *instead
            )


class _OnSlurm(submitit.SlurmExecutor):
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
        # The job's own environment has its own Python.
        python = "python" if spec.venv or spec.conda else sys.executable
        spec = replace(
            spec,
            command=(python, "-u", "-m", "submitit.core._submit", os.fspath(folder)),
            launcher="srun",  # each process of submitit is a task
            environment={**spec.environment, "SUBMITIT_EXECUTOR": "slurm"},
            output=spec.output or os.path.relpath(folder / "%j.log"),
        )
        submitted = submission.send(spec, self._env)
        for note in submitted.notes:
            logger.warning("%s", note)
        tasks = list(range(spec.nodes * spec.tasks))
        return submitit.SlurmJob(folder=folder, job_id=submitted.job, tasks=tasks)


def _submit_to_slurm(work: RankWork, spec: JobSpec, env: Mapping[str, str]) -> Job:
    if spec.launcher == "none":
        raise UsageError(
            "HT811",
            f"launcher = {spec.launcher!r} in a job of submitit",
            "hpctrain, or srun",
            _AS_SCRIPT,
        )
    spec = site.completed(spec, env)
    scratch = env.get(env_vars.SCRATCH, "")
    own_python = not (spec.venv or spec.conda)
    if own_python and scratch and submission.is_below(scratch, sys.executable):
        raise UsageError(
            "HT805",
            f"{sys.executable} is a temporary copy of this job",
            "a Python that still exists when the next job runs",
            "JobSpec(venv=…)",
            "JobSpec(conda=…)",
        )
    with new_folder() as folder:
        try:
            executor = _OnSlurm(folder, spec, env)
        except RuntimeError as error:
            raise StartError(
                "HT815",
                f"no Slurm here: {error}",
                "a host of the cluster",
                "via='local' runs it here",
            ) from None
        job_id = executor.submit(work).job_id
        run_dir = _run_directory(spec, env, f"runs/{spec.title}-{job_id}")
        record = JobRecord(folder, job_id, spec.nodes * spec.tasks, run_dir, spec.title)
        record.write()
    return Job(record)


def _start_on_this_machine(work: RankWork, spec: JobSpec, env: Mapping[str, str]) -> Job:
    _refuse(spec, _UNSUPPORTED_LOCALLY)
    if spec.nodes > 1:
        raise UsageError(
            "HT811",
            f"nodes = {spec.nodes} via 'local'",
            "nodes = 1",
            "dataclasses.replace(spec, nodes=1)",
        )
    # Set in each rank, as submitit sets this variable itself, and counts from 0.
    devices = {visible_gpus.CUDA: _visible_gpus(spec, env)}
    work = replace(work, environ=devices, warned=signal.SIGUSR2)
    python = shlex.quote(os.path.join(os.path.abspath(spec.venv), "bin", "python"))
    environment = env_vars.scrubbed(submission.environ(spec, env)[0])
    seconds = units.seconds(spec.time) if spec.time else _MOST_SECONDS
    with new_folder() as folder:
        # The folder is new, even if another job is submitted in the same second.
        run_dir = _run_directory(spec, env, f"runs/{spec.title}-{folder.name}")
        rank_variables = {
            env_vars.RUN_DIR: os.fspath(run_dir),
            env_vars.SECRET: secrets.token_hex(16),
        }
        with _environ({**environment, **spec.environment, **rank_variables}):
            executor = submitit.LocalExecutor(folder, python=python if spec.venv else None)
            executor.update_parameters(
                tasks_per_node=spec.tasks,
                timeout_min=seconds / 60,
                signal_delay_s=spec.signal_seconds,
                stderr_to_stdout=True,
            )
            started = executor.submit(work)
    return LocalJob(JobRecord(folder, started.job_id, spec.tasks, run_dir, spec.title), started)


def _prepare_in_this_process(work: RankWork, spec: JobSpec, env: Mapping[str, str]) -> Job:
    with new_folder() as folder:
        run_dir = _run_directory(spec, env, f"runs/{spec.title}-{folder.name}")
        with _environ({**env, **spec.environment, env_vars.RUN_DIR: os.fspath(run_dir)}):
            started = submitit.DebugExecutor(folder).submit(replace(work, inside=True))
    return DebugJob(JobRecord(folder, started.job_id, 1, run_dir, spec.title), started)


_VIA: dict[str, Callable[[RankWork, JobSpec, Mapping[str, str]], Job]] = {
    "slurm": _submit_to_slurm,
    "local": _start_on_this_machine,
    "debug": _prepare_in_this_process,
}


def _visible_gpus(spec: JobSpec, env: Mapping[str, str]) -> str:
    """Return as many of the GPUs visible to this process as a node of the job has."""
    listed = visible_gpus.visible(env)
    names = list(listed.names) if listed else visible_gpus.here()
    if spec.gpus > len(names):
        raise UsageError(
            "HT811",
            f"gpus_per_node = {spec.gpus_per_node}, and this machine shows {len(names)}",
            f"at most {len(names)}" if names else "0: ranks on CPUs",
            f"dataclasses.replace(spec, gpus_per_node={len(names)}, tasks_per_node=…)",
        )
    return ",".join(names[: spec.gpus])


def _run_directory(spec: JobSpec, env: Mapping[str, str], default: str) -> Path:
    """Return the run directory: exported by the user, else set in the job, else the default."""
    clean, _ = submission.environ(spec, env)
    return Path(clean.get(env_vars.RUN_DIR) or spec.run_dir or default).absolute()


@contextlib.contextmanager
def _environ(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the environment for a library that reads only `os.environ`; restore it at the end."""
    previous = dict(os.environ)
    try:
        _set_environ(environment)
        yield
    finally:
        _set_environ(previous)


def _set_environ(environment: Mapping[str, str]) -> None:
    # Only what differs, as another thread of a notebook may read it at the same time.
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update({k: v for k, v in environment.items() if os.environ.get(k) != v})
