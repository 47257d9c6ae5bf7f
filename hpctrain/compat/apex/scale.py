"""Loss scale with the bounds and the state of Apex's."""

from typing import Any

import torch

from hpctrain.precision.scaler import LossScaler
from hpctrain.process.logging import logger

__all__ = ["Scale"]


class Scale(LossScaler):
    """The scale of one loss.

    A dynamic scale begins at 2**16, is halved at an overflow, and doubled after 2,000 steps without
    one. Steps that overflow are skipped under a fixed scale as well; Apex took them.

    Args:
        device: device of the models.
        scale: a number, or "dynamic".
        least: lower bound of a dynamic scale; None for no bound.
        most: upper bound of a dynamic scale.
    """

    def __init__(
        self, device: torch.device, scale: float | str, least: float | None, most: float
    ) -> None:
        super().__init__(device, scale)
        self._least, self._most = least, most
        if self._fixed is None:
            self._init_scale = min(self._init_scale, most)

    @property
    def idle(self) -> bool:
        """Whether the scale is fixed at 1, so that it changes nothing."""
        return self._fixed == 1.0

    def overflowed(self) -> bool:
        """Check whether an optimizer has gradients that are not finite; waits for the device."""
        return any(found.item() > 0 for found in self.overflows())

    def follow(self) -> None:
        """Update the scale from the overflows, within its bounds."""
        super().follow()
        if self._fixed is None and self._scale is not None:
            self._scale.clamp_(self._least, self._most)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in Apex's checkpoints: the scale, and the steps since it changed."""
        state = super().state_dict()
        return {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; a fixed scale stays as the script sets it."""
        scale = float(state_dict["loss_scale"])
        if self._fixed is None:
            state = {"scale": scale, "_growth_tracker": int(state_dict["unskipped"])}
            super().load_state_dict({**super().state_dict(), **state})
        elif scale != self._fixed:
            logger.warning(
                "the checkpoint has a loss scale of %g, the script a fixed one of %g, which stays",
                scale,
                self._fixed,
            )
