"""What an expert writes without hpctrain: the yardstick of `hpctrain bench`."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Baseline"]


class Baseline:
    """For one process, which shares nothing; each backend with several ranks has its own."""

    def sum(self, tensor: Tensor) -> None:
        """The raw call that sums a tensor over the ranks, in place."""

    def share(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Both as they train with those of the other ranks.

        Args:
            model: on its device.
            optimizer: of its parameters.
        """
        return model, optimizer

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """The optimizer's step after a backward pass.

        Args:
            optimizer: of `share`.
            scaler: of the loss; it may be switched off.
        """
        scaler.step(optimizer)
