"""The choice of the device for a rank."""

import re
import sys
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack

import torch

from hpctrain._version import OLDEST_TORCH
from hpctrain.cluster import visible_gpus
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.texts import first_line
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = [
    "check_torch",
    "choose",
    "index_of",
    "no_gpu_reason",
    "passed_over",
    "sums_on_host",
    "take_slice",
]

# Not as an export before srun, because srun sets the variable again in each task.
_HIDE = f"to train on the CPU: env {visible_gpus.CUDA}= python SCRIPT"
# Modules of torch for accelerators that a rank does not use, and of packages that extend torch.
_UNSUPPORTED = ("xpu", "hpu", "npu", "mtia", "mlu", "musa")


def check_torch(version: str, folder: str) -> None:
    """Refuse a torch that is too old, which pip does not notice over a module of the site.

    Args:
        version: version of torch, such as 2.10.0a0+b4e4ee81d3.nv25.12, which counts as 2.10.
        folder: where it is installed.

    Raises:
        UsageError: it is older than `OLDEST_TORCH`.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    oldest = tuple(map(int, OLDEST_TORCH.split(".")))
    if numbers and (int(numbers[1]), int(numbers[2])) < oldest:
        raise UsageError(
            "HT121.too-old", version=version, folder=folder, oldest=OLDEST_TORCH, sys=sys
        )


def sums_on_host(device: torch.device) -> bool:
    """Check whether the host keeps the sums of a device: the GPU of a Mac has no float64."""
    return device.type in ("cpu", "mps")


def take_slice(world: World, env: MutableMapping[str, str], undo: ExitStack) -> int:
    """Make only this rank's own MIG slice visible, and return how many were; 0 without several.

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
        return 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError("HT115.cuda-already-started")
    before = env[visible_gpus.CUDA]
    undo.callback(env.__setitem__, visible_gpus.CUDA, before)
    env[visible_gpus.CUDA] = own
    return len(before.split(","))


def choose(
    world: World, job: Allocation | None, env: Mapping[str, str], name: str = "auto"
) -> torch.device:
    """Return the device of this rank; a GPU becomes the current device.

    Args:
        world: place of this rank.
        job: job of the scheduler; an error is raised if torch cannot use its GPUs.
        env: environment with the variables that select the visible GPUs.
        name: kind of device: cpu, cuda, mps, or auto: a GPU of CUDA or ROCm, the GPU of a Mac for
            one rank, else the CPU.

    Raises:
        UsageError: this host has more ranks than GPUs, or torch cannot use the job's GPUs, or the
            device is not there.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps" or (name == "auto" and torch.backends.mps.is_available()):
        return _of_a_mac(world, name)
    if torch.version.hip:
        visible_gpus.check_rocm(env)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        texts = [str(warning.message) for warning in caught]
        if name == "cuda":
            reason, _ = no_gpu_reason(texts)
            raise UsageError("HT116.device-unusable", device=name, torch=torch, reason=reason)
        _check_idle_gpus(job, env, texts)
        return torch.device("cpu")
    on_node = (job.gpus if job else None) or len(visible_gpus.here())
    device = torch.device("cuda", index_of(world, torch.cuda.device_count(), on_node))
    torch.cuda.set_device(device)
    return device


def _of_a_mac(world: World, name: str) -> torch.device:
    """Return the GPU of a Mac, which only one rank can use: gloo cannot carry its tensors.

    Source: pytorch issue 160732.
    """
    if not torch.backends.mps.is_available():
        reason = "it is the GPU of a Mac"
        raise UsageError("HT116.device-unusable", device=name, torch=torch, reason=reason)
    if world.world_size == 1:
        return torch.device("mps")
    if name == "mps":
        raise UsageError("HT116.several-ranks-on-a-mac", world_size=world.world_size)
    if world.rank == 0:
        ranks = world.world_size
        logger.info("%d ranks on the CPU: gloo cannot carry tensors of the Mac's GPU", ranks)
    return torch.device("cpu")


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


def passed_over(env: Mapping[str, str]) -> UsageError | None:
    """Return a warning if torch sees accelerators that no rank uses; None without any.

    Args:
        env: environment with the variables that select the visible GPUs.
    """
    visible = visible_gpus.visible(env)
    if visible is not None and not visible.names:  # hidden on purpose
        return None
    accelerator = getattr(torch, "accelerator", None)  # the doctor also looks at an old torch
    current = (
        accelerator.current_accelerator() if accelerator and accelerator.is_available() else None
    )
    own = [current.type] if current and current.type not in ("cuda", "mps") else []
    for kind in (*own, *_UNSUPPORTED):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return UsageError("HT120.unsupported", kind=kind, count=module.device_count())
    return None


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


def index_of(world: World, visible: int, on_node: int = 0) -> int:
    """Return the index of a rank's GPU among the GPUs visible to its process.

    If each task sees one GPU (Slurm's --gpus-per-task, or --gpu-bind), the index is 0, otherwise
    the local rank. Two ranks on one GPU are detected at the rendezvous, as one process alone
    cannot detect them.

    Args:
        world: place of the rank.
        visible: number of GPUs visible to this process, at least 1.
        on_node: number of GPUs that the job has on this node; 0 if it is unknown.

    Raises:
        UsageError: the local rank is not below the number of visible GPUs.
    """
    if visible == 1:
        return 0
    if world.local_rank >= visible:
        ranks = world.local_world_size or world.local_rank + 1
        key = "HT113.too-few-gpus" if ranks > on_node else "HT113.bound-to-some-gpus"
        raise UsageError(key, world=world, gpus=visible, ranks=ranks, on_node=on_node)
    return world.local_rank
