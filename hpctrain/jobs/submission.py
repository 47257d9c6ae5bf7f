"""Submission of a job by sbatch: checks, environment, folders."""

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars, slurm
from hpctrain.cluster.texts import listed
from hpctrain.errors import UsageError
from hpctrain.jobs import script
from hpctrain.jobs.directives import LOG, LOG_OF_ARRAY
from hpctrain.jobs.log_names import filled
from hpctrain.jobs.script import is_python
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import frozen_code

__all__ = [
    "Sent",
    "check",
    "check_folders",
    "environ",
    "is_below",
    "log",
    "log_folder",
    "log_size",
    "run_directory",
    "send",
    "text",
    "trial",
]

# A shell with one of these variables is inside of a job.
_JOB_ID_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
# Variables from the scheduler and the script of that job, besides those of launchers.
_OUTER_JOB_VARIABLES = (
    *(env_vars.RUN_DIR, env_vars.SECRET),
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
)
# A line of bash after which paths mean other files.
_CD = re.compile(r"\b(cd|pushd)\b")
# Arguments that only a shell interprets.
_SHELL_OPERATORS = ("&&", "||", "|", ";", ">", ">>", "<", "&")


@dataclass(frozen=True, slots=True)
class Sent:
    """A job that Slurm has accepted.

    Attributes:
        job: job number; for an array, the number of the array.
        notes: lines to show to the user.
    """

    job: str
    notes: tuple[str, ...]


def send(spec: JobSpec, env: Mapping[str, str], option_of: Callable[[str], str] = str) -> Sent:
    """Submit a job by sbatch from the current folder.

    Args:
        spec: job with the defaults of its profile and site.
        env: environment of this process.
        option_of: function that returns the option for a name of JobSpec, for messages.

    Raises:
        UsageError: Slurm refuses a value of the job, or the job could not run.
        StartError: this host has no Slurm, or Slurm does not answer.
    """
    notes = check(spec, env)
    text(spec)  # refuses what cannot work, before anything is written
    check_folders(spec, env)
    _make_log_folder(spec, env)
    tree, code_notes = _freeze(spec)
    clean, left_out = environ(spec, env)
    answer = _answer(text(spec, tree), spec, clean, option_of)
    if tree:
        frozen_code.note_job(frozen_code.STORE, answer.job, tree)
    return Sent(answer.job, (*notes, *code_notes, *left_out, *answer.message.splitlines()))


def _freeze(spec: JobSpec) -> tuple[str, list[str]]:
    """Record the code of a job; return the name of the snapshot and notes for the user."""
    if spec.live:
        return "", []
    try:
        snapshot = frozen_code.freeze(Path(), frozen_code.STORE, sys.path)
    except (slurm.NoAnswerError, OSError) as error:
        return "", [f"the code is not frozen, so an edit changes the job: {error}"]
    notes = []
    if snapshot.left_out:
        size = frozen_code.LARGEST >> 20
        names = listed(snapshot.left_out)
        notes.append(f"not in the frozen code, as larger than {size} MB: {names}")
    return snapshot.tree, notes


def trial(spec: JobSpec, env: Mapping[str, str], option_of: Callable[[str], str] = str) -> str:
    """Return the answer of `sbatch --test-only`, which submits nothing; empty without sbatch.

    Raises:
        UsageError, StartError: as in `send`.
    """
    if shutil.which("sbatch", path=env.get("PATH", os.defpath)) is None:
        return ""
    return _answer(text(spec), spec, environ(spec, env)[0], option_of, "--test-only").message


def text(spec: JobSpec, tree: str = "") -> str:
    """Return the script of a job that is submitted here; see `script.render`.

    Its log is among the runs, as their folder is made here. Scripts for sbatch do without a folder:
    Slurm ends a job without a message if the folder of its log does not exist.
    """
    return script.render(replace(spec, output=_log_pattern(spec)), tree)


def _answer(
    script_text: str,
    spec: JobSpec,
    env: Mapping[str, str],
    option_of: Callable[[str], str],
    *options: str,
) -> slurm.Answer:
    # Through standard input: a file could change before the job starts.
    try:
        answer = slurm.sbatch(script_text.encode(errors="surrogateescape"), env, options)
    except slurm.NoAnswerError as error:
        from hpctrain.jobs import sbatch_errors  # only on an error, as it is slow

        raise sbatch_errors.absent(str(error)) from None
    if answer.code or not (answer.job or options):
        from hpctrain.jobs import sbatch_errors

        raise sbatch_errors.refused(answer.message, spec, env, option_of)
    return answer


def environ(spec: JobSpec, env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment to submit a job with, and notes on the user's variables left out.

    SBATCH_* would overrule the lines of the script. Inside of a job, no variable of that job is
    passed on.
    """
    clean = {name: value for name, value in env.items() if not name.startswith("SBATCH_")}
    site_variables = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS")
    ignored = sorted(
        name for name in env if name.startswith("SBATCH_") and name not in site_variables
    )
    notes = [f"{', '.join(ignored)}: ignored; set it by an option"] if ignored else []
    if any(env.get(name) for name in _JOB_ID_VARIABLES):
        clean = env_vars.scrubbed(clean)
        scratch = env.get(env_vars.SCRATCH, "")
        clean = {
            name: _without(scratch, value) if scratch and _lists_folders(name) else value
            for name, value in clean.items()
            if name not in _OUTER_JOB_VARIABLES
        }
    if clean.get(env_vars.RUN_DIR) and (spec.run_dir or spec.indices):
        reason = "the job sets its own" if spec.run_dir else "each task has its own"
        notes.append(f"{env_vars.RUN_DIR}={clean.pop(env_vars.RUN_DIR)}: ignored, as {reason}")
    return clean, notes


def _lists_folders(name: str) -> bool:
    """Check whether a variable may hold the path of a job's copy."""
    return name.endswith("PATH") or name == env_vars.DATA


def _without(scratch: str, path: str) -> str:
    """Return a search path without entries below a folder, where others may later put files."""
    return os.pathsep.join(
        entry for entry in path.split(os.pathsep) if not is_below(scratch, entry)
    )


def is_below(folder: str, path: str) -> bool:
    """Check whether a path is a folder, or in it."""
    return os.path.normpath(path) == folder or os.path.normpath(path).startswith(folder + os.sep)


def _log_pattern(spec: JobSpec) -> str:
    """Return the name of the log, with Slurm's patterns."""
    return spec.output or f"runs/{LOG_OF_ARRAY if spec.indices else LOG}"


def log(spec: JobSpec, job: str, index: int | None, env: Mapping[str, str]) -> str:
    """Return the log of a job, or of an array task; empty if its name is not known yet."""
    numbers = {"j": job} if index is None else {"A": job, "a": str(index)}
    try:
        return _expanded(_log_pattern(spec), spec, env, numbers)
    except LookupError:
        return ""


def log_size(spec: JobSpec, env: Mapping[str, str]) -> int:
    """Return the bytes of an earlier job in a log without the job's number in its name."""
    try:
        return os.stat(_expanded(_log_pattern(spec), spec, env)).st_size
    except (OSError, LookupError):
        return 0


def run_directory(spec: JobSpec, job: str, index: int | None, env: Mapping[str, str]) -> Path:
    """Return the run directory of a job, or of an array task, relative to the current folder."""
    if given := rundir.given(spec.command):
        return Path(given)
    if given := spec.run_dir or environ(spec, env)[0].get(env_vars.RUN_DIR, ""):
        return Path(given, "" if index is None else str(index))
    return Path(rundir.default(spec.title, job if index is None else f"{job}_{index}"))


def log_folder(spec: JobSpec, env: Mapping[str, str]) -> Path | None:
    """Return the folder that must exist for the job's log; None for the current one.

    Raises:
        UsageError: its name has a pattern that is known only when the job runs.
    """
    folder = os.path.dirname(_log_pattern(spec))
    if not folder:
        return None
    try:
        return Path(_expanded(folder, spec, env))
    except LookupError as error:
        raise UsageError(
            "HT807",
            f"output = {spec.output}: a folder named by {error}",
            "a folder that can be created before the job has a number",
            f"output = {os.path.join('logs', os.path.basename(spec.output))}",
        ) from None


def check_folders(spec: JobSpec, env: Mapping[str, str]) -> None:
    """Check whether the log and the runs can be written; create nothing.

    Slurm would end the job without a message if it could not open the log.

    Raises:
        UsageError: a folder cannot be written, or the run directory is a file.
    """
    pattern = _log_pattern(spec)
    folder = log_folder(spec, env) or Path()
    if not _is_writable(folder):
        log_is_writable = False
        with contextlib.suppress(LookupError):
            log_is_writable = os.access(_expanded(pattern, spec, env), os.W_OK)
        if not log_is_writable:
            raise UsageError(
                "HT809",
                f"output = {pattern}: you may not write in the folder {folder.absolute()}",
                "a log in a folder of your own",
            )
    run = run_directory(spec, "JOB", None, env)
    if run.exists() and not run.is_dir():
        raise UsageError("HT809", f"run_dir = {run} is a file", "an existing or a new folder")
    # Another folder may be one that only the hosts of the job have.
    if (run.exists() or not run.is_absolute()) and not _is_writable(run):
        raise UsageError(
            "HT809",
            f"the run directory {run}: you may not write in {run.absolute().parent}",
            "a folder of your own to submit from, or another run directory",
            "--run-dir DIR",
        )


def _is_writable(folder: Path) -> bool:
    """Check whether the user may write in a folder, or create it, by the existing modes."""
    path = folder.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _make_log_folder(spec: JobSpec, env: Mapping[str, str]) -> None:
    folder = log_folder(spec, env) or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "HT809",
            f"output = {_log_pattern(spec)}: {error}",
            "a log in a folder that can be created",
        ) from None


def _expanded(
    pattern: str, spec: JobSpec, env: Mapping[str, str], numbers: Mapping[str, str] | None = None
) -> str:
    """Return the expanded pattern; raise LookupError if a part is known only when the job runs."""
    user = {"u": env["USER"]} if env.get("USER") else {}
    return filled(pattern, {"x": spec.title, **user, **(numbers or {})})


def check(spec: JobSpec, env: Mapping[str, str]) -> list[str]:
    """Check whether the files of a job exist here; return notes on what cannot be checked here.

    Raises:
        UsageError: a file is missing, and nothing could create it before the job starts; or the
            current folder, where the job would start, does not exist any more.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "HT805", "the current folder does not exist any more", "an existing folder", "cd to it"
        ) from None
    for name in ("stage_code", "stage_environment", "stage_data"):
        path = getattr(spec, name)
        if path and not os.path.exists(path):
            raise UsageError(
                "HT805",
                f"{name} = {path} does not exist",
                "an existing path, from the current folder",
            )
    notes = []
    if spec.venv and not os.path.exists(os.path.join(spec.venv, "bin", "activate")):
        found = f"venv = {spec.venv} has no bin/activate"
        if not os.path.isabs(spec.venv):
            raise UsageError("HT805", found, "a virtual environment, by its path from here")
        notes.append(f"{found} on this host")
    if not spec.container and not spec.setup:
        notes += _check_command(spec, env)
    _check_options(spec)
    return notes


def _check_command(spec: JobSpec, env: Mapping[str, str]) -> list[str]:
    """Check the program and the Python script of a job that starts in this folder."""
    program, *arguments = spec.command
    notes = []
    if is_python(program) and arguments and not arguments[0].startswith("-"):
        path = os.path.join(spec.stage_code, arguments[0])
        if not os.path.isfile(path):
            where = f"in stage_code = {spec.stage_code}" if spec.stage_code else "here"
            found = f"{shlex.join(spec.command[:2])}: {arguments[0]} is no file {where}"
            if not spec.dependency and not os.path.isabs(path):
                raise UsageError("HT805", found, f"a script, by its path from {os.getcwd()}")
            notes.append(found)
    folders = [os.path.join(spec.venv, "bin")] if spec.venv else []
    path = os.pathsep.join([*folders, env.get("PATH", os.defpath)])
    provided_later = spec.modules or spec.conda or spec.stage_environment or spec.stage_code
    if not provided_later and shutil.which(program, path=path) is None:
        _refuse_mistake(spec, path)
        notes.append(f"{program} is no program on the PATH of this host")
    if operators := [argument for argument in arguments if argument in _SHELL_OPERATORS]:
        notes.append(f"no shell reads the command: {operators[0]} is an argument (bash -c '…')")
    return notes


def _check_options(spec: JobSpec) -> None:
    """Check the options of a training script, once for each setting of a sweep.

    Raises:
        UsageError: the script cannot train with them.
    """
    program, *arguments = spec.command
    elsewhere = any(map(_CD.search, spec.setup)) or spec.stage_code not in ("", ".")
    if elsewhere or not is_python(program) or not arguments or not arguments[0].endswith(".py"):
        return
    from hpctrain.jobs import training_options  # only for these scripts

    # With one task, `hpctrain run` starts a rank for each GPU that it finds.
    is_certain = spec.launcher != "none" and (spec.tasks > 1 or spec.gpus == 1)
    for setting in spec.sweep or ((),):
        more = [word for name, value in setting for word in (f"--{name}", value)]
        training_options.check(
            arguments[0],
            [*arguments[1:], *more],
            ranks=spec.nodes * spec.tasks if is_certain else None,
            complete=not (spec.dependency or spec.setup),
        )


def _refuse_mistake(spec: JobSpec, path: str) -> None:
    """Raise UsageError if a program that is not on a PATH is one of two known mistakes."""
    program = spec.command[0]
    if program.endswith(".py") and os.path.isfile(program) and not os.access(program, os.X_OK):
        raise UsageError(
            "HT806", f"the command {shlex.join(spec.command)}: {program} is no program",
            "python before a script", f"python {shlex.join(spec.command)}",
        )  # fmt: skip
    first, *others = program.split() or [""]
    if others and len(spec.command) == 1 and shutil.which(first, path=path):
        raise UsageError(
            "HT806", f"the command {shlex.quote(program)}: one word, with spaces in it",
            "one word for each argument", f"-- {program}",
        )  # fmt: skip
