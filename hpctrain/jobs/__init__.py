"""Slurm jobs: described once, then rendered, checked and submitted. Never imports torch.

Public names are imported on first use. This module and `hpctrain.cli` read the environment.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpctrain._lazy import lazy

if TYPE_CHECKING:
    from hpctrain.jobs.handle import Job
    from hpctrain.jobs.job_watching import curves
    from hpctrain.jobs.spec import JobSpec

__all__ = ["Job", "JobSpec", "curves", "find", "submit"]

if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = lazy(
        __name__, {"handle": ("Job",), "job_watching": ("curves",), "spec": ("JobSpec",)}
    )


def submit(
    train: Callable[..., Any] | str | os.PathLike[str],
    spec: "JobSpec",
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> "Job":
    """Run a function or a script on all ranks of a job, from Python or a notebook, by submitit.

    Each rank calls the function in its own process, where `hpctrain.Session()` detects the rank.
    cloudpickle serializes the function and its arguments, so a notebook may define them. The job
    runs the script that `hpctrain render` would write: it saves and is requeued when it is
    preempted or its time ends, each rank can see all GPUs of its host, and `HPCTRAIN_RUN_DIR` is
    the same in all starts.

    Args:
        train: function to run; or path of a script, which each rank runs as `__main__`.
        spec: description of the job, without a command.
        args: positional arguments of the function, a tuple or list; for a script, its command line.
        kwargs: keyword arguments of the function.

    Returns:
        Handle of the job. In another process, `hpctrain.jobs.find` returns a handle of it.

    Raises:
        UsageError: submitit is not installed; wrong arguments; an object that cannot be pickled; or
            a field of the spec that such a job cannot have, with what to do instead.
        StartError: Slurm does not accept the job.
    """
    from hpctrain.jobs import by_submitit

    return by_submitit.send(train, spec, args, kwargs or {}, os.environ)


def find(job: str | int | os.PathLike[str]) -> "Job":
    """Return a job that `submit` has sent to Slurm from this folder, in this or another process.

    Args:
        job: id of the job; or its folder in `runs/.submitit`, from any current folder.

    Raises:
        UsageError: there is no such job (the message lists the known ones); or other users own its
            folder or can write in it.
    """
    from hpctrain.jobs import job_store
    from hpctrain.jobs.handle import Job

    return Job(job_store.find(job))
