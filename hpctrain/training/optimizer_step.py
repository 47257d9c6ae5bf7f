"""Optimizer step after the last backward pass: average, unscale, clip, update, clear."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hpctrain.arguments import Options
from hpctrain.backends.base import Backend
from hpctrain.optim import EMA
from hpctrain.precision import Precision

__all__ = ["Update"]


class Update:
    """Optimizer step for gradients that are complete on this rank.

    Args:
        backend: averages the gradients over the ranks.
        precision: scales and unscales the gradients.
        options: options of the session; `clip_value` and `clip_norm` are used.
    """

    def __init__(self, backend: Backend, precision: Precision, options: Options) -> None:
        self._backend = backend
        self._precision = precision
        self._value, self._norm = options.clip_value, options.clip_norm
        self._clips = self._value is not None or self._norm is not None

    def __call__(
        self, chosen: Sequence[Optimizer], prepared: Sequence[Optimizer], ema: EMA | None
    ) -> None:
        """Take the step.

        Args:
            chosen: optimizers that take the step.
            prepared: optimizers whose gradients are cleared. The loss of one model also leaves
                gradients in other models that it used.
            ema: moving average of the weights, updated after the step.
        """
        self._backend.sync_gradients()
        for optimizer in chosen:
            if self._clips:
                self._clip(optimizer)
            self._backend.update(optimizer, self._precision.step)
        self._precision.update()
        for optimizer in prepared:
            self._precision.clear(optimizer)
        if ema is not None:
            ema.update()

    def _clip(self, optimizer: Optimizer) -> None:
        """Clip each element first, then the norm of all parameters of an optimizer."""
        self._precision.unscale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._value is not None:
            nn.utils.clip_grad_value_(parameters, self._value)
        if self._norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._norm)
