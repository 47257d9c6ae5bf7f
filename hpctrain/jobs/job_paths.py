"""Where the log and the run of a job will be, as far as that is known before it runs."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars
from hpctrain.errors import UsageError
from hpctrain.jobs.job_environment import environ
from hpctrain.jobs.log_names import filled
from hpctrain.jobs.schedulers import LOG, LOG_OF_ARRAY
from hpctrain.jobs.spec import JobSpec

__all__ = ["log", "log_folder", "log_size", "pattern", "run_directory"]


def pattern(spec: JobSpec) -> str:
    """Return the name of the log, with Slurm's patterns."""
    return spec.output or f"runs/{LOG_OF_ARRAY if spec.indices else LOG}"


def log(spec: JobSpec, job: str, index: int | None, env: Mapping[str, str]) -> str:
    """Return the log of a job, or of an array task; empty if its name is not known yet."""
    numbers = {"j": job} if index is None else {"A": job, "a": str(index)}
    try:
        return _expanded(pattern(spec), spec, env, numbers)
    except LookupError:
        return ""


def log_size(spec: JobSpec, env: Mapping[str, str]) -> int:
    """Return the bytes of an earlier job in a log without the job's number in its name."""
    try:
        return os.stat(_expanded(pattern(spec), spec, env)).st_size
    except (OSError, LookupError):
        return 0


def run_directory(spec: JobSpec, job: str, index: int | None, env: Mapping[str, str]) -> Path:
    """Return the run directory of a job, or of an array task, relative to the current folder."""
    if given := rundir.given(spec.command):
        return Path(given)
    if given := spec.run_dir or environ(spec, env)[0].get(env_vars.RUN_DIR, ""):
        return Path(given, "" if index is None else str(index))
    return Path(rundir.default(spec.title, job if index is None else f"{job}_{index}"))


def log_folder(spec: JobSpec, env: Mapping[str, str]) -> Path:
    """Return the folder that must exist for the job's log.

    Raises:
        UsageError: its name has a pattern that is known only when the job runs.
    """
    folder = os.path.dirname(pattern(spec))
    try:
        return Path(_expanded(folder, spec, env))
    except LookupError as error:
        file = os.path.basename(spec.output)
        raise UsageError("HT807.pattern-in-folder", spec=spec, pattern=error, file=file) from None


def _expanded(
    name: str, spec: JobSpec, env: Mapping[str, str], numbers: Mapping[str, str] | None = None
) -> str:
    """Return the expanded pattern; raise LookupError if a part is known only when the job runs."""
    user = {"u": env["USER"]} if env.get("USER") else {}
    return filled(name, {"x": spec.title, **user, **(numbers or {})})
