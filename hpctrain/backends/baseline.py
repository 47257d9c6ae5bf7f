"""The baseline of `hpctrain bench`: what an expert writes without hpctrain."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Baseline"]


class Baseline:
    """The baseline for one process; each backend with several ranks has its own."""

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks with the raw call, in place."""

    def share(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return model and optimizer prepared for training with the other ranks.

        Args:
            model: model, on its device.
            optimizer: optimizer of the model's parameters.
        """
        return model, optimizer

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Take the optimizer step after a backward pass.

        Args:
            optimizer: optimizer that `share` returned.
            scaler: scaler of the loss; it may be disabled.
        """
        scaler.step(optimizer)
