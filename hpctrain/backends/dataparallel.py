"""The backend of one process for all visible GPUs: torch.nn.DataParallel."""

from typing import Any

import torch
from torch import nn

from hpctrain.backends.settings import BackendSettings
from hpctrain.backends.single import Single
from hpctrain.backends.transparent import Transparent
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.rendezvous import Rendezvous

__all__ = ["DataParallel", "TransparentDataParallel"]


class DataParallel(Single):
    """A world of one rank that splits each micro-batch into one part per GPU.

    Source: `torch.nn.DataParallel`, which copies the model to all GPUs in every forward pass.
    Weights, gradients and losses are those of the first GPU. Batch norm on a GPU uses one part.
    """

    name = "dataparallel"

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, settings: BackendSettings
    ) -> None:
        super().__init__(rendezvous, device, settings)
        logger.info(
            "dataparallel copies the model to %d GPUs in every step; faster is ddp, a rank for "
            "each GPU: hpctrain run SCRIPT, without --backend dataparallel",
            torch.cuda.device_count(),
        )

    @classmethod
    def check(cls, world: World, device: torch.device, settings: BackendSettings) -> None:
        """Check that the world is one process that has a GPU."""
        if world.world_size > 1:
            raise UsageError("HT301.dataparallel-with-several-ranks", world=world)
        if device.type != "cuda":
            raise UsageError("HT301.dataparallel-without-gpu")

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped in DataParallel, over all GPUs."""
        return TransparentDataParallel(model)


class TransparentDataParallel(Transparent, nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel that exposes the attributes, names and state of the model inside.

    It computes on each GPU in a separate thread, in which torch loses the autocast type of the
    calling thread (`parallel_apply`, torch 2.15): bf16 would be fp16 there.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        outside = [torch.get_autocast_dtype("cuda")]
        self._outside = outside
        module.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", outside[0]))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on all GPUs, with the autocast type of the calling thread."""
        self._outside[0] = torch.get_autocast_dtype("cuda")
        return super().forward(*inputs, **kwargs)
