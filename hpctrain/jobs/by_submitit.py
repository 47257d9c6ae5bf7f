"""Functions and scripts as jobs of submitit: on Slurm, on this machine, or in this process.

submitit sends the work to the ranks and collects their results. Slurm gets the script of
`script.render` instead of submitit's own script: with all fields of JobSpec, with its quoting, and
with its way to save, to requeue and to give up.
"""

import contextlib
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.cluster import env_vars, proc, visible_gpus
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import function, site, submission, units
from hpctrain.jobs.function import Function, Script, SubmititRank
from hpctrain.jobs.handle import Job
from hpctrain.jobs.job_store import JobRecord, new_folder
from hpctrain.jobs.payload import check_launcher, of_call, of_command, refuse
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

__all__ = ["of_command", "send", "submit"]

_EXECUTOR = "SUBMITIT_EXECUTOR"
# Time limit of a local job without one, as submitit requires it.
_MOST_SECONDS = 10 * 365 * 86400

# Fields that a batch script would apply before the ranks start.
_SET_UP_OUTSIDE = ("set it up before this process starts", "via='slurm'")
_UNSUPPORTED_LOCALLY = {
    **dict.fromkeys(("modules", "setup", "conda"), _SET_UP_OUTSIDE),
    "dependency": ("remove it, and wait for the other job's result()",),
    "cluster": ("remove it: profiles are only for Slurm's jobs",),
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
    if via == "slurm":
        spec = site.completed(spec, env)
    work, title = of_call(train, spec, args, kwargs)
    return _VIA[via](work, replace(spec, name=title, backend=""), env)


def submit(spec: JobSpec, env: Mapping[str, str] = os.environ) -> str:
    """Submit a job's own command, `python X.py …` or `python -m M …`, to Slurm.

    Args:
        spec: job with such a command, and with the defaults of its profile.
        env: environment of this process.

    Returns:
        The id of the job.

    Raises:
        UsageError: another command, or a field that a submitit job cannot have.
        StartError: Slurm does not accept the job.
    """
    work, python = of_command(spec)
    plain = replace(spec, name=spec.title, command=(), backend="")
    return _submit_to_slurm(work, plain, env, python).id


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


class _OnSlurm(submitit.SlurmExecutor):
    """submitit's executor, with the script of a JobSpec.

    Args:
        folder: folder of the job.
        spec: complete description of the job.
        env: environment of this process.
        program: Python interpreter of the ranks.

    Raises:
        RuntimeError: this host has no srun.
    """

    def __init__(self, folder: Path, spec: JobSpec, env: Mapping[str, str], program: str) -> None:
        super().__init__(folder)
        self._spec, self._env, self._program = spec, env, program

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        """Submit the script that starts each rank; submitit's shell line `command` is not used."""
        del command
        spec = self._spec
        program_and_arguments = (
            self._program,
            "-u",
            "-m",
            "submitit.core._submit",
            os.fspath(self.folder),
        )
        submitted = submission.send(
            replace(
                spec,
                command=program_and_arguments,
                launcher="srun",  # each process of submitit is a task
                environment={**spec.environment, _EXECUTOR: "slurm"},
                output=spec.output or os.path.relpath(self.folder / "%j.log"),
            ),
            self._env,
        )
        for note in submitted.notes:
            logger.warning("%s", note)
        tasks = list(range(spec.nodes * spec.tasks))
        return submitit.SlurmJob(folder=self.folder, job_id=submitted.job, tasks=tasks)


def _submit_to_slurm(
    work: Function | Script, spec: JobSpec, env: Mapping[str, str], python: str = ""
) -> Job:
    check_launcher(spec)
    # The job's own environment has its own Python.
    python = python or ("python" if spec.venv or spec.conda else sys.executable)
    scratch = env.get(env_vars.SCRATCH, "")
    if scratch and submission.is_below(scratch, python):
        raise UsageError(
            "HT805",
            f"{python} is a temporary copy of this job",
            "a Python that still exists when the next job runs",
            "JobSpec(venv=…)",
            "JobSpec(conda=…)",
        )
    with new_folder() as folder:
        try:
            executor = _OnSlurm(folder, spec, env, python)
        except RuntimeError as error:
            raise StartError(
                "HT815",
                f"no Slurm here: {error}",
                "a host of the cluster",
                "via='local' runs it here",
            ) from None
        job_id = executor.submit(SubmititRank(work, {})).job_id
        run_dir = _run_directory(spec, env, f"runs/{spec.title}-{job_id}")
        ranks = spec.nodes * spec.tasks
        record = JobRecord(folder, job_id, "slurm", ranks, run_dir, spec.title)
        record.write()
    return Job(record, env)


def _start_on_this_machine(work: Function | Script, spec: JobSpec, env: Mapping[str, str]) -> Job:
    refuse(spec, _UNSUPPORTED_LOCALLY)
    if spec.nodes > 1:
        raise UsageError(
            "HT811",
            f"nodes = {spec.nodes} via 'local'",
            "nodes = 1",
            "dataclasses.replace(spec, nodes=1)",
        )
    # Set in each rank, as submitit sets this variable itself, and counts from 0.
    devices = {visible_gpus.CUDA: _visible_gpus(spec, env)}
    python = shlex.quote(os.path.join(os.path.abspath(spec.venv), "bin", "python"))
    environment = env_vars.scrubbed(submission.environ(spec, env)[0])
    seconds = units.seconds(spec.time) if spec.time else _MOST_SECONDS
    with new_folder() as folder:
        run_dir = _run_directory(spec, env, _default_run_dir(spec, folder))
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
            )
            submitit_job = executor.submit(SubmititRank(work, devices, warned=signal.SIGUSR2))
        job_id, start_time = submitit_job.job_id, proc.started(int(submitit_job.job_id))
        record = JobRecord(folder, job_id, "local", spec.tasks, run_dir, spec.title, start_time)
        record.write()
    return Job(record, env, submitit_job)


def _prepare_in_this_process(work: Function | Script, spec: JobSpec, env: Mapping[str, str]) -> Job:
    with new_folder() as folder:
        run_dir = _run_directory(spec, env, _default_run_dir(spec, folder))
        with _environ({**env, **spec.environment, env_vars.RUN_DIR: os.fspath(run_dir)}):
            submitit_job = submitit.DebugExecutor(folder).submit(function.run, work)
    return Job(
        JobRecord(folder, submitit_job.job_id, "debug", 1, run_dir, spec.title), env, submitit_job
    )


_VIA: dict[str, Callable[[Function | Script, JobSpec, Mapping[str, str]], Job]] = {
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


def _default_run_dir(spec: JobSpec, folder: Path) -> str:
    """Return a run directory named after the job's folder.

    That folder is new, even if another job is submitted in the same second.
    """
    return f"runs/{spec.title}-{folder.name}"


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
