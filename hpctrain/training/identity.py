"""Which directory does a run have, and is what lies in it this run?"""

import hashlib
import json
import os
import platform
import subprocess
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
from hpctrain.cluster import env_vars
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.world import World
from hpctrain.errors import GivenUpError, UsageError
from hpctrain.rundir import DONE, MOST_FRUITLESS, STATUS, RunDirectory, append, create, default
from hpctrain.rundir.lock import Lock

__all__ = ["claim", "facts", "note_start", "refuse_fruitless"]

FORMAT = 1
# What makes two runs the same run; anything else may change from one start to the next.
_IDENTITY = ("name", "data", "model")
_GIT_SECONDS = 5.0


def claim(
    name: str,
    models: Sequence[nn.Module],
    options: Options,
    world: World,
    job: Allocation | None,
    env: Mapping[str, str],
) -> tuple[RunDirectory, Lock | None]:
    """Find or make the run directory, and lock it. Called by rank 0 alone.

    Args:
        name: of the run.
        models: whose weights it has.
        options: of the session; `run`, `resume`, `elastic`, `data` and the end matter.
        world: of the session, for run.json.
        job: the scheduler's, for the default name and the restart count.
        env: for $HPCTRAIN_RUN.

    Returns:
        The directory and its lock; None where the run in it is finished, and no more is asked for.

    Raises:
        UsageError: the directory has a run in it and `--resume` was not given, or another run,
            or files of somebody else, or cannot be written; or another start is at work in it.
    """
    said = {"name": name, "data": options.data, "model": _signature(models)}
    resume = options.resume
    if resume is None:
        resume = options.elastic or (job is not None and job.restart_count > 0)
    path = options.run or env.get(env_vars.RUN) or default(name, job.label if job else None)
    directory = RunDirectory(path)
    before = directory.read(directory.identity)
    if before is None:
        _refuse_strangers(directory)
    else:
        _refuse_other_runs(directory, before, said, resume)
        if _finished(directory, options):
            return directory, None
    lock = Lock.take(directory, job, env)
    if before is not None:
        return directory, lock
    about = {"format": FORMAT, **said, "created": time.time(), "world": asdict(world)}
    try:
        create(directory.identity, json.dumps(about, indent=1) + "\n")
    except OSError as error:
        lock.release()
        if isinstance(error, FileExistsError):  # another start was faster, and is over
            _refuse_other_runs(directory, directory.read(directory.identity), said, False)
        raise UsageError(
            f"the run directory {directory.path} cannot be made: {error}",
            "a place that can be written",
            "--run DIR",
        ) from None
    return directory, lock


def _refuse_other_runs(
    directory: RunDirectory, before: Mapping[str, Any], said: Mapping[str, Any], resume: bool
) -> None:
    """Hold run.json to what this start says of itself."""
    if not resume:
        saved = max(directory.steps(), default=None)
        where = "begin it again" if saved is None else f"go on from step {saved}"
        raise UsageError(
            f"{directory.path} has a run in it",
            "an empty or new run directory",
            f"--resume to {where}, or --run DIR for another",
        )
    for key in _IDENTITY:
        if before.get(key) != said[key]:
            raise UsageError(
                f"{directory.path} belongs to another run: its {key} is {before.get(key)!r}, "
                f"this one's is {said[key]!r}",
                "the run that began there",
                "--run DIR for another directory",
            )


def _finished(directory: RunDirectory, options: Options) -> bool:
    """Whether the run is done, and this start asks for no later end than it has come to.

    Who asks for the same end as the last start gets nothing more: a script may have left its loop
    before, for reasons of its own.
    """
    summary = directory.read(directory.summary) or {}
    if summary.get("status") != STATUS[DONE]:
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
    """What the manifest of every checkpoint says of the run."""
    said = directory.read(directory.identity) or {}
    return {
        "run": {name: said.get(name) for name in _IDENTITY},
        "world": asdict(world),
        "versions": _versions(),
    }


def refuse_fruitless(directory: RunDirectory, job: Allocation | None, step: int) -> None:
    """Give up what a scheduler starts again and again at the same step.

    Args:
        directory: of the run.
        job: the scheduler's; only a requeued one is held to its earlier starts.
        step: at which this start would go on.

    Raises:
        GivenUpError: as many starts of the job before it went on there, too.
    """
    if job is None or not job.restart_count:
        return
    fruitless = 0
    for line in reversed(directory.lines(directory.starts)):
        if (line.get("job") or {}).get("job_id") != job.job_id or line.get("step") != step:
            break
        fruitless += 1
    if fruitless >= MOST_FRUITLESS:
        raise GivenUpError(
            f"{fruitless} starts of job {job.label} in a row went on from step {step} and left no "
            "newer checkpoint",
            "progress from one start to the next",
            "look for the first error in the logs; --checkpoint-every or --checkpoint-minutes with "
            "a smaller number, or a longer time limit; then submit it again with --resume",
        )


def _refuse_strangers(directory: RunDirectory) -> None:
    """A directory with files but without run.json is somebody else's."""
    try:
        names = sorted(os.listdir(directory.path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(
            f"the run directory {directory.path} cannot be read: {error}",
            "a directory",
            "--run DIR",
        ) from None
    # Log files may be there first: a batch script opens them before any rank starts.
    logs = directory.logs.name if directory.logs.is_dir() else None
    strangers = [name for name in names if not name.startswith(".") and name != logs]
    if strangers:
        raise UsageError(
            f"{directory.path} is not empty ({', '.join(strangers[:5])}), and no run is in it",
            "an empty or new run directory",
            "--run DIR for another",
        )


def note_start(
    directory: RunDirectory,
    options: Options,
    own: Mapping[str, Any],
    device: torch.device,
    world: World,
    job: Allocation | None,
    step: int,
) -> None:
    """Append to starts.jsonl how the run was started this time, and at which step it goes on.

    Args:
        directory: of the run.
        options: those that all scripts share.
        own: the script's own, by name.
        device: of rank 0.
        world, job: of this start.
        step: at which it goes on.
    """
    cuda = device.type == "cuda"
    line = {
        "time": time.time(),
        "command": sys.argv,
        "options": asdict(options),
        "own_options": own,
        "step": step,
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "versions": _versions(),
        "commit": _commit(),
        "world": asdict(world),
        "job": asdict(job) if job else None,
    }
    append(directory.starts, json.dumps(line, default=str))


def _versions() -> dict[str, str]:
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _commit() -> str | None:
    """The git commit of the script's folder, where there is one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(sys.argv[0]).resolve().parent,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _signature(models: Sequence[nn.Module]) -> str:
    """Names and shapes of all weights, short: what has to agree before a state is loaded."""
    shapes = [
        (name, list(tensor.shape))
        for model in models
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    ]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
