"""The baseline for Horovod."""

from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.backends.baseline import Baseline

__all__ = ["HorovodBaseline"]


class HorovodBaseline(Baseline):
    """The baseline with DistributedOptimizer, as in Horovod's examples.

    Args:
        hvd: `horovod.torch`, initialized.
    """

    def __init__(self, hvd: ModuleType) -> None:
        self._hvd = hvd

    def sum(self, tensor: Tensor) -> None:
        """Sum the tensor with Horovod's all-reduce."""
        self._hvd.allreduce_(tensor, name="baseline", op=self._hvd.Sum)

    def share(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return the same model, and the optimizer in a DistributedOptimizer."""
        hvd = self._hvd
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        shared: Optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return model, shared

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Take the optimizer step; gradients are averaged before the scaler checks them."""
        if not scaler.is_enabled():
            optimizer.step()
            return
        optimizer.synchronize()  # type: ignore[attr-defined]
        with optimizer.skip_synchronize():  # type: ignore[attr-defined]
            scaler.step(optimizer)
