"""The baseline for torch.distributed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpctrain.backends.baseline import Baseline

__all__ = ["DDPBaseline"]


class DDPBaseline(Baseline):
    """The baseline with DistributedDataParallel and the default process group, which is open.

    Args:
        device: device used by this rank.
        arguments: further arguments of DistributedDataParallel.
    """

    def __init__(self, device: torch.device, arguments: dict[str, Any]) -> None:
        self._devices = [device] if device.type == "cuda" else None
        self._arguments = arguments

    def sum(self, tensor: Tensor) -> None:
        """Sum the tensor with torch's all-reduce."""
        dist.all_reduce(tensor)

    def share(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap the model in DistributedDataParallel; the optimizer stays the same."""
        shared = DistributedDataParallel(
            model, device_ids=self._devices, gradient_as_bucket_view=True, **self._arguments
        )
        return shared, optimizer
