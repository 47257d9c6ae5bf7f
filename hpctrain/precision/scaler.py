"""Loss scale, dynamic or fixed."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LossScaler"]

_START = 2.0**16  # as GradScaler's and Apex's
_LEAST_START = 2.0**10


class LossScaler(torch.amp.GradScaler):
    """GradScaler that also supports a fixed scale, and gradients in half precision.

    Source: torch.amp's documentation, "Gradient Scaling". A dynamic scale is halved at each
    overflow and doubled after 2,000 steps without one. A fixed scale does not change; steps with
    an overflow are skipped all the same.

    Args:
        device: device used by this rank.
        scale: a number, or "dynamic". A dynamic scale starts at 65,536 / world_size, rounded down
            to a power of two, and at least 1,024. So a micro-batch has the same factor, and the
            same steps overflow, whether ranks share a step or one process accumulates it, which
            divides the loss as well.
        world_size: number of ranks that share a step.
    """

    def __init__(
        self, device: torch.device, scale: float | str | None, world_size: int = 1
    ) -> None:
        self._fixed = None if isinstance(scale, str) or scale is None else float(scale)
        start = max(2.0 ** math.floor(math.log2(_START / world_size)), _LEAST_START)
        super().__init__(device.type, init_scale=self._fixed or start)

    def overflows(self) -> Sequence[Tensor]:
        """Return a tensor of each optimizer since the last `follow`, above 0 after an overflow."""
        return [
            found
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]

    def skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of an optimizer was skipped, before `follow`."""
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        return any(float(one) > 0 for one in found)

    def follow(self) -> None:
        """Update the scale after a step."""
        if self.overflows():  # empty if no optimizer had gradients
            self.update(self._fixed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dynamic scale; a fixed one keeps the value of this start."""
        if self._fixed is None:
            super().load_state_dict(state_dict)

    def value(self) -> float | Tensor:
        """Return the scale; on a GPU as a tensor with one element there."""
        if self._scale is None or self._scale.device.type == "cpu":
            return self.get_scale()
        return self._scale

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        """Allow gradients in half precision, which O3 has and GradScaler refuses."""
        optimizer, inverse, found = args[:3]
        return super()._unscale_grads_(optimizer, inverse, found, True, **kwargs)
