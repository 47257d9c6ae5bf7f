"""The choice of the device for a rank."""

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack

import torch

from hpctrain.cluster import visible_gpus
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.texts import first_line
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["choose", "index_of", "no_gpu_reason", "take_slice"]

# Not as an export before srun, because srun sets the variable again in each task.
_HIDE = f"to train on the CPU: env {visible_gpus.CUDA}= python SCRIPT"


def take_slice(world: World, env: MutableMapping[str, str], undo: ExitStack) -> None:
    """Make only this rank's own MIG slice visible, if the process has several slices.

    CUDA reads the variable once, at its start, and uses only the first slice.

    Args:
        world: place of this rank.
        env: environment to change.
        undo: stack that receives the callback which restores the variable.

    Raises:
        UsageError: there are more ranks than slices, or CUDA has already started.
    """
    own = visible_gpus.own_slice(env, world.local_rank)
    if own is None:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError("HT115.cuda-already-started")
    undo.callback(env.__setitem__, visible_gpus.CUDA, env[visible_gpus.CUDA])
    env[visible_gpus.CUDA] = own


def choose(world: World, job: Allocation | None, env: Mapping[str, str]) -> torch.device:
    """Return this rank's GPU and make it the current device; return the CPU if there is no GPU.

    Args:
        world: place of this rank.
        job: job of the scheduler; an error is raised if torch cannot use its GPUs.
        env: environment with the variables that select the visible GPUs.

    Raises:
        UsageError: this host has more ranks than GPUs, or torch cannot use the job's GPUs.
    """
    if torch.version.hip:
        visible_gpus.check_rocm(env)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        _check_idle_gpus(job, env, [str(warning.message) for warning in caught])
        return torch.device("cpu")
    device = torch.device("cuda", index_of(world, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _check_idle_gpus(
    job: Allocation | None, env: Mapping[str, str], warning_texts: Sequence[str]
) -> None:
    """Refuse to leave the job's GPUs idle; outside of such a job, only warn about idle GPUs.

    Raises:
        UsageError: the job has GPUs that torch cannot use.
    """
    visible = visible_gpus.visible(env)
    if visible is not None and not visible.names:
        return
    reason, fixes = no_gpu_reason(warning_texts)
    if job and job.gpus:
        raise UsageError("HT116.gpus-unusable", job=job, torch=torch, reason=reason, fixes=fixes)
    if visible_gpus.here():
        logger.warning(
            "this machine has GPUs, and torch %s can use none: %s; fix: %s",
            torch.__version__,
            reason,
            "; or: ".join((*fixes, _HIDE)),
        )


def no_gpu_reason(warning_texts: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the reason why torch has no GPU, and what to type."""
    if not torch.version.cuda and not torch.version.hip:
        return (
            "it is a CPU build",
            ("pip install --force-reinstall torch (from the index with the CUDA build)",),
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "no reason given"
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
    reason = next((line for line in warning_texts if "driver" in line.lower()), reason)
    if "too old" in reason:
        return reason, ("load a module with a newer driver", "install torch for an older CUDA")
    return reason, (
        "run nvidia-smi on this node",
        "in a container: apptainer exec --nv, docker run --gpus all",
    )


def index_of(world: World, visible: int) -> int:
    """Return the index of a rank's GPU among the GPUs visible to its process.

    If each task sees one GPU (Slurm's --gpus-per-task, or --gpu-bind), the index is 0, otherwise
    the local rank. Two ranks on one GPU are detected at the rendezvous, as one process alone
    cannot detect them.

    Args:
        world: place of the rank.
        visible: number of GPUs visible to this process, at least 1.

    Raises:
        UsageError: the local rank is not below the number of visible GPUs.
    """
    if visible == 1:
        return 0
    if world.local_rank >= visible:
        ranks = world.local_world_size or world.local_rank + 1
        raise UsageError("HT113.too-few-gpus", world=world, gpus=visible, ranks=ranks)
    return world.local_rank
