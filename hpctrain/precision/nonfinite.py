"""Counter of steps without finite numbers, which does not wait for the device."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["NonFinite"]


class NonFinite:
    """Counter of steps whose loss is infinite or NaN, or whose gradients overflowed.

    Args:
        device: device used by this rank; on a GPU the counts stay there.

    Attributes:
        skipped: number of steps skipped after an overflow, equal on all ranks.
        streak: number of consecutive steps without finite numbers, up to the last step, on this
            rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._loss: Any = False  # whether a micro-batch of this step had a non-finite loss
        self.skipped: Any = 0
        self.streak: Any = 0

    def check_loss(self, loss: Tensor) -> None:
        """Check the loss of a micro-batch."""
        if self._on_host:
            if not math.isfinite(loss.item()):
                self._loss = True
        else:
            self._loss = self._loss | ~torch.isfinite(loss.detach())

    def end_step(self, overflows: Sequence[Tensor]) -> None:
        """Update the counts at the end of a step.

        Args:
            overflows: tensor of each optimizer, above 0 after an overflow; shape (1,) or ().
        """
        if self._on_host and not (overflows or self._loss or self.streak):
            return  # nearly every step
        left_out: Any = False
        if overflows:
            left_out = torch.stack([found.reshape(()) for found in overflows]).sum() > 0
            if self._on_host:
                left_out = left_out.item()
        bad = self._loss | left_out
        self.skipped = self.skipped + left_out
        self.streak = (self.streak + 1) * bad
        self._loss = False
