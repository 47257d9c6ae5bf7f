"""The scale of a loss, dynamic or fixed."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScaler"]

_START = 2.0**16  # as GradScaler's and Apex's
_LEAST_START = 2.0**10


class LossScaler(torch.amp.GradScaler):
    """GradScaler, with a fixed scale as well, for gradients in half precision as well.

    Source: torch.amp's documentation, "Gradient Scaling". A dynamic scale is halved at each
    overflow and doubled after 2,000 steps without one. A fixed one stays; steps that overflow are
    left out all the same.

    Args:
        device: of this rank.
        scale: a number, or "dynamic". That begins at 65,536 over the ranks, a power of two: then a
            micro-batch goes backward with the same factor, and overflows in the same steps, whether
            ranks share a step or one process accumulates it, which divides the loss as well. But
            not below 1,024.
        world_size: ranks that share a step.
    """

    def __init__(
        self, device: torch.device, scale: float | str | None, world_size: int = 1
    ) -> None:
        self._fixed = None if isinstance(scale, str) or scale is None else float(scale)
        start = max(2.0 ** math.floor(math.log2(_START / world_size)), _LEAST_START)
        super().__init__(device.type, init_scale=self._fixed or start)

    def overflows(self) -> Sequence[Tensor]:
        """Of each optimizer stepped since the last `follow`: above 0 after an overflow."""
        return [
            found
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]

    def follow(self) -> None:
        """Let the scale follow the overflows."""
        if self.overflows():  # none where no optimizer had gradients
            self.update(self._fixed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a dynamic scale; a fixed one is that of this start."""
        if self._fixed is None:
            super().load_state_dict(state_dict)

    def value(self) -> float | Tensor:
        """The scale; on a GPU a tensor of one element there."""
        if self._scale is None:
            return self._init_scale
        return self._scale.item() if self._scale.device.type == "cpu" else self._scale

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        """GradScaler refuses gradients in half precision, which O3 has."""
        optimizer, inverse, found = args[:3]
        return super()._unscale_grads_(optimizer, inverse, found, True, **kwargs)
