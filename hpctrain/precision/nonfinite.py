"""Steps without finite numbers, counted without waiting for the device."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["NonFinite"]


class NonFinite:
    """Counts steps whose loss is infinite or no number, or whose gradients overflowed.

    Args:
        device: of this rank; on a GPU the counts stay there.

    Attributes:
        skipped: steps that were left out after an overflow, the same on all ranks.
        streak: steps in a row without finite numbers, up to the last one, on this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._loss: Any = False  # whether that of a micro-batch of this step was not finite
        self.skipped: Any = 0
        self.streak: Any = 0

    def see(self, loss: Tensor) -> None:
        """The loss of a micro-batch."""
        if self._on_host:
            if not math.isfinite(loss.item()):
                self._loss = True
        else:
            self._loss = self._loss | ~torch.isfinite(loss.detach())

    def end(self, overflows: Sequence[Tensor]) -> None:
        """The end of a step.

        Args:
            overflows: of each optimizer, above 0 after an overflow; shape (1,) or ().
        """
        if self._on_host and not (overflows or self._loss or self.streak):
            return  # nearly every step
        if not overflows:
            left_out: Any = False
        elif self._on_host:
            left_out = any(found.item() > 0 for found in overflows)
        else:
            left_out = torch.stack([found.reshape(()) for found in overflows]).sum() > 0
        bad = self._loss | left_out
        self.skipped = self.skipped + left_out
        self.streak = (self.streak + 1) * bad
        self._loss = False
