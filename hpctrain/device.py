"""Which device belongs to a rank?"""

import os
from collections.abc import Sequence

import torch

from hpctrain.errors import UsageError
from hpctrain.world import World

__all__ = ["check_all", "choose", "identity", "index_of"]


def choose(world: World) -> torch.device:
    """This rank's GPU, or the CPU where torch sees no GPU. Makes the GPU the current one.

    Raises:
        UsageError: more ranks on this host than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index_of(world, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def index_of(world: World, visible: int) -> int:
    """The index of a rank's GPU among those that its process sees.

    With one GPU visible to each task (Slurm's --gpus-per-task, or --gpu-bind) that is 0, otherwise
    the local rank. Two ranks on one GPU are found when the ranks meet, as no process can see it
    alone.

    Args:
        world: the rank.
        visible: the number of GPUs that this process sees, at least 1.

    Raises:
        UsageError: the local rank is beyond the visible GPUs.
    """
    if visible == 1:
        return 0
    if world.local_rank >= visible:
        ranks = f"{world.local_world_size or world.local_rank + 1} ranks"
        raise UsageError(
            f"local rank {world.local_rank} and {visible} visible GPUs: {ranks} on this host",
            "at most one rank for each GPU",
            f"start {visible} ranks on each host, or hide the GPUs: export CUDA_VISIBLE_DEVICES=",
        )
    return world.local_rank


def identity(device: torch.device) -> str | None:
    """What tells one GPU from any other anywhere; None for a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", None) or f"{os.uname().nodename}:{device.index}")


def check_all(gpus: Sequence[str | None], hosts: Sequence[str]) -> None:
    """Refuse what no process can see alone: one GPU for two ranks, or one for only some.

    Args:
        gpus: by rank, its identity.
        hosts: by rank, the name of its host.

    Raises:
        UsageError: naming the ranks.
    """
    seen: dict[str, int] = {}
    for rank, (gpu, host) in enumerate(zip(gpus, hosts, strict=True)):
        if gpu is None:
            if any(gpus):
                raise UsageError(
                    f"torch sees no GPU at rank {rank} on {host} ({list(gpus).count(None)} such "
                    f"ranks of {len(gpus)}), the others have one",
                    "a GPU for every rank, or for none",
                    "look at nvidia-smi there; or hide all GPUs: export CUDA_VISIBLE_DEVICES=",
                )
            continue
        other = seen.setdefault(gpu, rank)
        if other != rank:
            raise UsageError(
                f"ranks {other} and {rank} share one GPU ({gpu}) of {host}",
                "a GPU of its own for each rank",
                "start as many ranks on each host as it has GPUs, or hide the GPUs: "
                "export CUDA_VISIBLE_DEVICES=",
            )
