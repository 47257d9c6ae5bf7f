"""Identity of a run: which directory it has, and whether a directory belongs to it."""

import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain._version import __version__
from hpctrain.arguments import Options
from hpctrain.cluster import commands, env_vars, system
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.world import World
from hpctrain.errors import GivenUpError, UsageError, exit_codes
from hpctrain.rundir import RunDirectory, append, create, default, no_room
from hpctrain.rundir.lock import Lock
from hpctrain.rundir.lock.record import look
from hpctrain.training.context import Context

__all__ = [
    "claim",
    "facts",
    "is_again",
    "note_end",
    "note_start",
    "of_run",
    "refuse_fruitless",
    "signature",
]

FORMAT = 1
# Values that identify a run; all others may change from one start to the next.
_IDENTITY = ("name", "model")


def claim(
    name: str | None, script: str, context: Context, env: Mapping[str, str]
) -> tuple[RunDirectory, Lock | None]:
    """Find or create the run directory, and lock it; called by rank 0 only.

    Args:
        name: name of the run, which has a folder of this name in a directory that is set; None for
            the run that has the directory itself.
        script: name of the script.
        context: context of the training. Its models identify the run, by the names and shapes of
            their weights; its job gives the default name and the restart count.
        env: environment variables, for $HPCTRAIN_RUN_DIR and the lock.

    Returns:
        The directory and its lock; the lock is None if the run is finished and the options ask for
        no later end.

    Raises:
        UsageError: the directory has a run and `--resume` was not given; it has another run or
            foreign files; it cannot be written; another start uses it; or this process has ended a
            run in it.
    """
    options, job = context.options, context.allocation
    own = {"name": name or script, "model": signature(context.models)}
    resume = options.resume
    if resume is None:
        resume = options.elastic or is_again(env) or (job is not None and job.restart_count > 0)
    label = job.label if job else _agent_label(env)
    path = options.run_dir or env.get(env_vars.RUN_DIR)
    directory = RunDirectory(path or default(name or script, label))
    if path and name is not None:
        directory = _of_name(directory, name)
    before = directory.read(directory.identity)
    if before is None:
        _refuse_other_files(directory)
    else:
        again = os.path.realpath(directory.path) in _ended
        finished = _finished(directory, options)
        if again and (finished or not resume):
            raise UsageError("HT618.second-run", directory=directory)
        _refuse_other_runs(directory, before, own, resume)
        if finished:
            return directory, None
    lock = Lock.take(directory, job, env)
    if before is not None:
        return directory, lock
    about = {
        "format": FORMAT,
        **own,
        "in_folder_of_name": bool(path) and directory.path != Path(path or ""),
        "created": time.time(),
        "world": asdict(context.world),
    }
    try:
        create(directory.identity, json.dumps(about, indent=1) + "\n")
    except OSError as error:
        lock.release()
        if isinstance(error, FileExistsError):  # another start was faster and has ended
            _refuse_other_runs(directory, directory.read(directory.identity), own, False)
        raise no_room(directory.path, "run.json", error) or UsageError(
            "HT617.cannot-create", directory=directory, error=error
        ) from None
    return directory, lock


# Directories of the runs that this process has ended, or found finished.
_ended: set[str] = set()


def note_end(directory: RunDirectory) -> None:
    """Record that this process has ended a run, or found it finished."""
    _ended.add(os.path.realpath(directory.path))


def _of_name(directory: RunDirectory, name: str) -> RunDirectory:
    """Return the directory of a run with a name.

    Raises:
        UsageError: no folder can have the name.
    """
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise UsageError("HT618.name", name=name, suggested=re.sub(r"[^\w-]+", "-", name) or "run")
    # Earlier versions kept a run with a name in the directory itself.
    before = directory.read(directory.identity) or {}
    return directory if before.get("name") == name else RunDirectory(directory.path / name)


def is_again(env: Mapping[str, str]) -> bool:
    """Return whether the launcher has started the ranks before: torchrun, or `hpctrain run`."""
    attempt = env.get(env_vars.START, "").partition("/")[2]
    return attempt not in ("", "0") or env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _agent_label(env: Mapping[str, str]) -> str | None:
    """Return the start of torchrun's agent as a label, the same for all its attempts."""
    if env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    start = system.start_time(os.getppid())
    return None if start is None else time.strftime("%Y%m%d-%H%M%S", time.localtime(start))


def _refuse_other_runs(
    directory: RunDirectory, before: Mapping[str, Any], own: Mapping[str, Any], resume: bool
) -> None:
    """Compare run.json with the identity of this start."""
    if not resume:
        owner = _owner(directory)
        if steps := directory.steps():
            raise UsageError("HT618.run-exists", directory=directory, step=max(steps), owner=owner)
        raise UsageError("HT618.run-without-checkpoint", directory=directory, owner=owner)
    for field in _IDENTITY:
        saved, current = before.get(field), own[field]
        if None not in (saved, current) and saved != current:
            raise UsageError(
                "HT618.other-run", directory=directory, field=field, saved=saved, current=current
            )


def _owner(directory: RunDirectory) -> str:
    """Return the launch that the lock of a run names, for a message; empty without a lock."""
    try:
        seen = look(directory.lock)
    except OSError:
        return ""
    return f"; its .lock names {seen.owner}" if seen is not None and seen.owner else ""


def _finished(directory: RunDirectory, options: Options) -> bool:
    """Check whether the run is done and this start asks for no later end.

    If the last start asked for the same end, nothing more is done: its script may have left the
    loop early on purpose.
    """
    summary = directory.read(directory.summary) or {}
    if summary.get("status") != exit_codes.STATUS[exit_codes.DONE]:
        return False
    starts = directory.lines(directory.starts)
    before = starts[-1].get("options") or {} if starts else {}
    ends = (("epochs", "epoch"), ("max_steps", "step"))
    if all(getattr(options, name) == before.get(name) for name, _ in ends):
        return True
    asked = [(getattr(options, name), summary.get(done, 0)) for name, done in ends]
    reached = [done >= end for end, done in asked if end is not None]
    return any(reached) or not reached


def facts(directory: RunDirectory, world: World) -> dict[str, Any]:
    """Return the facts about a run for the manifest of each checkpoint."""
    return {"run": of_run(directory), "world": asdict(world), "versions": _versions()}


def of_run(directory: RunDirectory) -> dict[str, Any]:
    """Return the values that identify a run, as they are in the manifests of its checkpoints."""
    record = directory.read(directory.identity) or {}
    return {name: record.get(name) for name in _IDENTITY}


def refuse_fruitless(directory: RunDirectory, job: Allocation | None, step: int) -> None:
    """Raise an error if a scheduler restarts a job again and again at the same step.

    Args:
        directory: run directory.
        job: job of the scheduler; only a requeued job is compared with its earlier starts.
        step: step at which this start would continue.

    Raises:
        GivenUpError: the last `MOST_FRUITLESS` starts of the job continued at this step, too.
    """
    if job is None or not job.restart_count:
        return
    fruitless = 0
    for line in reversed(directory.lines(directory.starts)):
        if (line.get("job") or {}).get("job_id") != job.job_id or line.get("step") != step:
            break
        fruitless += 1
    if fruitless >= exit_codes.MOST_FRUITLESS:
        raise GivenUpError("HT619.no-progress", fruitless=fruitless, job=job, step=step)


def _refuse_other_files(directory: RunDirectory) -> None:
    """Refuse a directory with files but without run.json: it belongs to something else."""
    try:
        names = sorted(os.listdir(directory.path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError("HT617.cannot-read", directory=directory, error=error) from None
    # Log files may be there first: a batch script opens them before any rank starts.
    known = {run.path.name for run in directory.runs()}
    known |= {directory.logs.name} if directory.logs.is_dir() else set()
    other_files = [name for name in names if not name.startswith(".") and name not in known]
    if other_files:
        files = ", ".join(other_files[:5])
        raise UsageError("HT618.not-empty", directory=directory, files=files)


def note_start(directory: RunDirectory, context: Context, step: int) -> None:
    """Append the command, options, versions and step of this start to starts.jsonl.

    Args:
        directory: run directory.
        context: context of the training at rank 0.
        step: step at which this start continues.
    """
    device, job = context.device, context.allocation
    line = {
        "time": time.time(),
        "command": sys.argv,
        "options": asdict(context.options),
        "own_options": context.own_options,
        "step": step,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": _versions(),
        "commit": os.environ.get(env_vars.COMMIT) or _commit(),
        "world": asdict(context.world),
        "job": asdict(job) if job else None,
        "start": os.environ.get(env_vars.START),
    }
    append(directory.starts, json.dumps(line, default=str))


def _commit() -> str | None:
    """Return the commit of the script's folder, with -dirty if its files differ from it."""
    folder = Path(sys.argv[0]).resolve().parent
    describe = "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=-dirty"
    return commands.git(folder, *describe)


def _versions() -> dict[str, str]:
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def signature(models: Sequence[nn.Module]) -> str:
    """Hash the names and shapes of all weights, which have to match before a state is loaded."""
    shapes = [
        (name, list(tensor.shape))
        for model in models
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    ]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
