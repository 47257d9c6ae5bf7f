"""Loss scale, dynamic or fixed, and the count of steps without finite numbers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScaler", "NonFinite"]

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


class NonFinite:
    """Counter of steps whose loss is infinite or NaN, or whose gradients overflowed.

    It does not wait for a GPU.

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
