"""Checks of a job before Slurm is asked: its files, its command and its folders."""

import os
import re
import shlex
import shutil
from collections.abc import Mapping

from hpctrain.cluster import slurm
from hpctrain.errors import UsageError
from hpctrain.jobs import job_paths, units
from hpctrain.jobs.script import is_python
from hpctrain.jobs.spec import JobSpec

__all__ = ["check"]

# Seconds from the start of a job to its stop signal, in which it may get its first checkpoint.
_LEAST_SECONDS = 60
# A line of bash after which paths mean other files.
_CD = re.compile(r"\b(cd|pushd)\b")
# Arguments that only a shell interprets.
_SHELL_OPERATORS = ("&&", "||", "|", ";", ">", ">>", "<", "&")


def check(spec: JobSpec, env: Mapping[str, str]) -> list[str]:
    """Check whether the files of a job exist here; return notes on what cannot be checked here.

    Raises:
        UsageError: a file is missing, and nothing could create it before the job starts; or the
            current folder, where the job would start, does not exist any more.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("HT805.current-folder-deleted") from None
    for name in ("stage_code", "stage_environment", "stage_data"):
        path = getattr(spec, name)
        if path and not os.path.exists(path):
            raise UsageError("HT805.no-such-path", name=name, path=path)
    notes = []
    if spec.venv and not os.path.exists(os.path.join(spec.venv, "bin", "activate")):
        if not os.path.isabs(spec.venv):
            raise UsageError("HT805.no-venv", spec=spec)
        notes.append(f"venv = {spec.venv} has no bin/activate on this node")
    if not spec.container and not spec.setup:
        notes += _check_command(spec, env)
    _check_options(spec)
    _check_folders(spec, env)
    return [*notes, *_check_time(spec)]


def _check_time(spec: JobSpec) -> list[str]:
    """Return a note if the stop signal may come before a job has trained."""
    if not (spec.time and spec.requeue and spec.signal_seconds):
        return []
    left = units.seconds(spec.time) - spec.signal_seconds - slurm.SIGNAL_EARLY
    if left >= _LEAST_SECONDS:
        return []
    return [
        f"time = {spec.time} leaves {max(left, 0)} s to start and train: the stop signal comes "
        f"{spec.signal_seconds} s before the end, or up to {slurm.SIGNAL_EARLY} s earlier; "
        "a longer --time, such as 10m, helps"
    ]


def _check_folders(spec: JobSpec, env: Mapping[str, str]) -> None:
    """Raise UsageError if the log or the run cannot be written; create nothing.

    Slurm would end the job without a message if it could not open the log.
    """
    places = []
    if not os.access(job_paths.log(spec, "", None, env), os.W_OK):  # such as /dev/null
        places = [(f"output = {job_paths.pattern(spec)}", job_paths.log_folder(spec, env))]
    run = job_paths.run_directory(spec, "JOB", None, env)
    # Another folder may be one that only the hosts of the job have.
    if run.exists() or not run.is_absolute():
        places.append((f"run_dir = {run}", run))
    for field, place in places:
        above = (place.absolute(), *place.absolute().parents)
        existing = next(folder for folder in above if os.path.lexists(folder))
        if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
            raise UsageError("HT809.no-write-permission", field=field, folder=place.absolute())


def _check_command(spec: JobSpec, env: Mapping[str, str]) -> list[str]:
    """Check the program and the Python script of a job that starts in this folder."""
    program, *arguments = spec.command
    notes = []
    if is_python(program) and arguments and not arguments[0].startswith("-"):
        path = os.path.join(spec.stage_code, arguments[0])
        if not os.path.isfile(path):
            command, folder = shlex.join(spec.command[:2]), os.getcwd()
            if not spec.dependency and not os.path.isabs(path):
                raise UsageError(
                    "HT805.no-script-in-command", command=command, path=path, folder=folder
                )
            notes.append(f"{command}: {path} is not a file in {folder}")
    folders = [os.path.join(spec.venv, "bin")] if spec.venv else []
    path = os.pathsep.join([*folders, env.get("PATH", os.defpath)])
    provided_later = spec.modules or spec.conda or spec.stage_environment or spec.stage_code
    if not provided_later and shutil.which(program, path=path) is None:
        _refuse_mistake(spec, path)
        notes.append(f"{program} is not on the PATH of this node")
    if operators := [argument for argument in arguments if argument in _SHELL_OPERATORS]:
        notes.append(f"no shell reads the command: {operators[0]} is an argument (bash -c '…')")
    return notes


def _check_options(spec: JobSpec) -> None:
    """Check the options of a training script.

    Raises:
        UsageError: the script cannot train with them.
    """
    program, *arguments = spec.command
    elsewhere = any(map(_CD.search, spec.setup)) or spec.stage_code not in ("", ".")
    if not elsewhere and is_python(program) and arguments and arguments[0].endswith(".py"):
        from hpctrain.jobs import training_options  # only for these scripts

        training_options.check(spec)


def _refuse_mistake(spec: JobSpec, path: str) -> None:
    """Raise UsageError if a program that is not on a PATH is one of two known mistakes."""
    program = spec.command[0]
    if program.endswith(".py") and os.path.isfile(program) and not os.access(program, os.X_OK):
        command = shlex.join(spec.command)
        raise UsageError("HT806.script-without-python", command=command, program=program)
    first, *others = program.split() or [""]
    if others and len(spec.command) == 1 and shutil.which(first, path=path):
        raise UsageError("HT806.command-in-quotes", program=program)
