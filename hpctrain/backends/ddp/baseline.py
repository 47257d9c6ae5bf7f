"""torch.distributed by hand."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpctrain.backends.baseline import Baseline

__all__ = ["DDPBaseline"]


class DDPBaseline(Baseline):
    """DistributedDataParallel and the default process group, which is open.

    Args:
        device: of this rank.
        arguments: more for DistributedDataParallel.
    """

    def __init__(self, device: torch.device, arguments: dict[str, Any]) -> None:
        self._devices = [device] if device.type == "cuda" else None
        self._arguments = arguments

    def sum(self, tensor: Tensor) -> None:
        """The all-reduce of torch."""
        dist.all_reduce(tensor)

    def share(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The optimizer stays what it is."""
        shared = DistributedDataParallel(
            model, device_ids=self._devices, gradient_as_bucket_view=True, **self._arguments
        )
        return shared, optimizer
