"""Leftovers of a loop by hand that make another gradient: backward(), zero_grad(), clipping."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from hpctrain.errors import UsageError
from hpctrain.precision import Precision

__all__ = ["GradientGuard", "watch_clipping"]

_STEPS = 3  # a loop that does it at all does it at its beginning


class GradientGuard:
    """Looks at gradients between backward passes, where `session.step` has left them.

    At each step it looks at one parameter, and at the first steps at all of them.
    """

    def __init__(self) -> None:
        self._named: list[tuple[str, nn.Parameter]] = []
        self._sentinel: nn.Parameter | None = None
        self._left = 0  # steps at which all are looked at
        self._seen: tuple[int, int] | None = None  # the sentinel's gradient, and its version

    def watch(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> None:
        """Begin anew with what is prepared.

        Args:
            models, optimizers: the prepared ones.
            precision: knows which weights an optimizer has in the place of a model's.
        """
        stepped = {
            id(p) for one in optimizers for group in one.param_groups for p in group["params"]
        }
        self._named = [
            (name, parameter)
            for model in models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(precision.master(parameter)) in stepped
        ]
        self._sentinel = self._named[-1][1] if self._named else None
        self._left = _STEPS

    def before(self, first: bool) -> None:
        """Before the backward pass of a micro-batch.

        Args:
            first: whether it is the first one of its step.

        Raises:
            UsageError: a gradient is there that `session.step` has not made, or is gone.
        """
        sentinel = self._sentinel
        if sentinel is None:
            return
        if not first:
            if self._seen is not None and self._seen != _look(sentinel):
                raise UsageError(
                    "the gradients were changed or cleared between the micro-batches of a step",
                    "that they add up, which is what --accumulate is for",
                    "remove optimizer.zero_grad() and the like: session.step() clears the "
                    "gradients after each step, and --clip-norm clips them before it",
                )
        elif self._left or sentinel.grad is not None:
            self._left -= self._left > 0
            self._refuse_present()

    def between(self) -> None:
        """After a backward pass to which others of the same step will add."""
        if self._sentinel is not None:
            self._seen = _look(self._sentinel)

    def _refuse_present(self) -> None:
        for name, parameter in self._named:
            if parameter.grad is not None and float(parameter.grad.detach().abs().sum()):
                raise UsageError(
                    f"{name} has a gradient before session.step()",
                    "that session.step() alone goes backward: it scales the loss, lets the ranks "
                    "average, and clears",
                    "remove loss.backward(); of several losses: session.step(loss_1 + loss_2)",
                )


def watch_clipping(late: Callable[[], bool], undo: ExitStack) -> None:
    """Refuse torch's clipping where `session.step` has cleared the gradients: it does nothing then.

    Both of its functions are watched by what they call, as scripts import them by name. Source:
    torch/nn/utils/clip_grad.py, torch 2.15.

    Args:
        late: whether a step was taken for the batch at hand.
        undo: is told how to put back what is changed.
    """
    for name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"):
        if hasattr(clip_grad, name):
            function = getattr(clip_grad, name)
            setattr(clip_grad, name, partial(_refuse_none, late, function))
            undo.callback(setattr, clip_grad, name, function)


def _refuse_none(
    late: Callable[[], bool],
    function: Callable[..., Any],
    tensors: Any,
    *more: Any,
    **keywords: Any,
) -> Any:
    none = isinstance(tensors, list) and not any(len(one) for one in tensors[:1])
    if none and late():
        raise UsageError(
            "gradients are clipped after session.step(), which has applied and cleared them",
            "that they are clipped before the update",
            "remove clip_grad_norm_() or clip_grad_value_(); --clip-norm X or --clip-value X",
        )
    return function(tensors, *more, **keywords)


def _look(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
