"""Losses averaged over what the global batch counts: tokens, pixels, boxes.

A rank knows only the count of its micro-batch, and the total only at the end of the step. So the
gradients are those of sums, and are divided by the total where they are unscaled.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.training.context import Context

__all__ = ["TokenCount"]


class TokenCount:
    """The count of a step: each micro-batch gives one to `session.backward(loss_sum, count=…)`.

    With n ranks the backends average gradients over the ranks, so the factor is n / total; with
    Horovod's sum it is 1 / total. Under a loss scale a sum could overflow in half precision, so it
    is also divided by a power of two near the count of a step on one rank. All ranks agree on it in
    the first step of a run, and checkpoints have it.

    Args:
        context: context of the training.

    Attributes:
        counts: whether the passes of this step have a count.
        count: count of this micro-batch, 0 for one that fills up; None without a count.
    """

    def __init__(self, context: Context) -> None:
        self._backend, self._precision = context.backend, context.precision
        self._batches = context.batches
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the counts of the last step."""
        self.counts = False
        self.count: Any = None
        self._sum: Any = 0  # of the micro-batches before this one
        self._total: Tensor | None = None  # over all ranks

    def end_micro_batch(self) -> None:
        """Add the count of the micro-batch to those of the step."""
        if self.counts:
            self._sum, self.count = self._sum + self.count, None

    def weigh(self, loss: Tensor, count: Any, weight: float, first: bool) -> Tensor:
        """Return the loss for a backward pass.

        Args:
            loss: sum of losses, of shape ().
            count: number of its terms, or None.
            weight: 0 for a micro-batch that only fills up a step; other weights have no effect.
            first: whether this is the first pass of the step.

        Raises:
            UsageError: only some passes of the step have a count, those of a micro-batch have
                different ones, the count is no number, or the gradients are not averaged.
        """
        if first:
            self.counts = count is not None
        if count is None or not self.counts:
            raise UsageError("HT608.count-in-some-passes")
        if self._backend.reduction not in ("mean", "sum"):
            raise UsageError("HT608.count-not-supported", reduction=self._backend.reduction)
        if weight == 0.0:
            loss, count = loss * 0.0, 0
        count = self._checked(count)
        if self.count is None:
            self.count = count
        elif self.count is not count and _on_host(count) and self.count != count:
            raise UsageError("HT608.counts-differ", count=float(count), other=float(self.count))
        if self._precision.scaler is None:
            return loss
        if self._precision.loss_divisor is None:
            self._precision.loss_divisor = self._divisor(count)
        return loss / self._precision.loss_divisor

    def divide(self, parameters: Sequence[Tensor]) -> None:
        """Divide summed gradients by the total of all ranks, in place; called by all ranks."""
        ranks = self._backend.world_size if self._backend.reduction == "mean" else 1
        total = self._over_ranks()
        factor = torch.where(total > 0, ranks * (self._precision.loss_divisor or 1.0) / total, 0.0)
        for gradient in [p.grad for p in parameters if p.grad is not None]:
            to_local = getattr(gradient, "to_local", None)  # of fsdp's DTensors
            local = to_local() if to_local else gradient
            local.mul_(factor.to(local.device))

    def is_zero(self) -> bool:
        """Return whether the total of all ranks is 0; waits for a GPU only if it may be."""
        own = self._sum + self.count
        return not (_on_host(own) and own > 0) and float(self._over_ranks()) == 0.0

    def _over_ranks(self) -> Tensor:
        if self._total is None:
            own = self._sum + (0 if self.count is None else self.count)
            self._total = self._backend.sum(self._tensor(own))
        return self._total

    def _divisor(self, count: Any) -> float:
        ranks = float(self._backend.sum(self._tensor(count)))
        mean = self._batches.accumulate * ranks / self._backend.world_size
        return 2.0 ** math.floor(math.log2(max(mean, 1.0)))

    def _tensor(self, count: Any) -> Tensor:
        device = self._backend.device_of_sums
        if isinstance(count, Tensor):
            return count.to(device, torch.float64, copy=True)
        return torch.full((), float(count), dtype=torch.float64, device=device)

    def _checked(self, count: Any) -> Any:
        if isinstance(count, Tensor) and count.numel() == 1:
            count = count.detach().reshape(())
            if count.device.type != "cpu":
                return count
            count = count.item()
        if not isinstance(count, int | float) or not 0 <= count < math.inf:
            raise UsageError("HT608.count-is-no-number", count=repr(count))
        return count


def _on_host(count: Any) -> bool:
    return not isinstance(count, Tensor)
