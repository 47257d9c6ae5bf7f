"""Describe a job once; render, check and submit it. Never imports torch.

What this module offers is imported when it is first used. Here, and in `hpctrain.cli`, the
environment is read.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hpctrain.jobs.handle import Job
    from hpctrain.jobs.spec import JobSpec

__all__ = ["Job", "JobSpec", "find", "submit"]

_HOME = {"Job": "handle", "JobSpec": "spec"}


def submit(
    train: Callable[..., Any] | str | os.PathLike[str],
    spec: "JobSpec",
    *,
    via: Literal["slurm", "local", "debug"] = "slurm",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> "Job":
    """Run a function or a script on all ranks of a job, from Python or a notebook, by submitit.

    Every rank calls the function in a process of its own; there `hpctrain.Session()` knows the
    rank. Function and arguments travel by cloudpickle, so they may come from a notebook. The job
    is that of the script which `hpctrain render` would write: it saves and is requeued when it is
    preempted or its time ends, its ranks have all GPUs of their host in sight, and
    `HPCTRAIN_RUN` is the same in all of its starts.

    Args:
        train: the function; or the path of a script, which each rank runs as `__main__`.
        spec: the job, without a command.
        via: `"slurm"`; `"local"`, ranks on this machine, without a queue and what it gives; or
            `"debug"`, one rank in this process as it is, which runs when its result is asked for,
            and opens the debugger where it fails.
        args: for the function, a tuple or list; for a script its command line.
        kwargs: for the function, by name.

    Returns:
        The job, to be waited for. `hpctrain.jobs.find` comes back to it from another process.

    Raises:
        UsageError: submitit is not installed; wrong arguments; something that cannot be pickled; or
            a field of the spec that these jobs cannot have, with what to do instead.
        StartError: Slurm does not take the job.
    """
    from hpctrain.jobs import by_submitit

    return by_submitit.send(train, spec, via, args, kwargs or {}, os.environ)


def find(job: str | int | os.PathLike[str]) -> "Job":
    """A job that `submit` has started from this folder, in this process or in another one.

    Args:
        job: its id; or its folder in `runs/.submitit`, from anywhere.

    Raises:
        UsageError: there is none, with those that there are; or its folder is not one's own.
    """
    from hpctrain.jobs import job_store
    from hpctrain.jobs.handle import Job

    return Job(job_store.read(job_store.find(job)), os.environ)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
