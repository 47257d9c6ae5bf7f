"""Checks for calls that falsify gradients: backward(), zero_grad(), clipping in the script."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad

from hpctrain.errors import UsageError
from hpctrain.training.context import Context, parameters_of

__all__ = ["GradientGuard", "watch_clipping"]

_STEPS = 3  # a script with such a call makes it in its first steps


class GradientGuard:
    """Check of the gradients between the backward passes of `session.step`.

    It checks one parameter at each step, and all parameters at the first steps.
    """

    def __init__(self) -> None:
        self._named: list[tuple[str, nn.Parameter]] = []
        self._sentinel: nn.Parameter | None = None
        self._left = 0  # steps left at which all parameters are checked
        self._seen: tuple[int, int] | None = None  # the sentinel's gradient, and its version

    def watch(self, context: Context) -> None:
        """Start again with the prepared models and optimizers."""
        stepped = {id(p) for one in context.optimizers for p in parameters_of(one)}
        self._named = [
            (name, parameter)
            for model in context.models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(context.precision.master(parameter)) in stepped
        ]
        self._sentinel = self._named[-1][1] if self._named else None
        self._left = _STEPS

    def before(self, first: bool) -> None:
        """Check the gradients before the backward pass of a micro-batch.

        Args:
            first: whether it is the first micro-batch of its step.

        Raises:
            UsageError: a gradient is not from `session.step`, or was changed or cleared.
        """
        sentinel = self._sentinel
        if sentinel is None:
            return
        if not first:
            if self._seen is not None and self._seen != _look(sentinel):
                raise UsageError(
                    "HT604",
                    "the gradients were changed or cleared between the micro-batches of a step",
                    "that they add up, which is what --accumulate is for",
                    "remove model.zero_grad(): session.step() clears the gradients, or the "
                    "optimizer's zero_grad() where a step ends",
                    "clip by --clip-norm, which clips before each step",
                )
        elif self._left or sentinel.grad is not None:
            self._left -= self._left > 0
            for name, parameter in self._named:
                if parameter.grad is not None and float(parameter.grad.detach().abs().sum()):
                    raise UsageError(
                        "HT604",
                        f"{name} has a gradient before session.step()",
                        "that session.step() alone goes backward: it scales the loss, lets the "
                        "ranks average, and clears",
                        "remove loss.backward()",
                        "session.step(loss_1 + loss_2), or session.backward() for each of several "
                        "losses",
                    )

    def between(self) -> None:
        """Record a gradient after a backward pass that is not the last one of its step."""
        if self._sentinel is not None:
            self._seen = _look(self._sentinel)


def watch_clipping(check: Callable[[bool], None], undo: ExitStack) -> None:
    """Call a function before torch clips gradients.

    Scripts import the two clipping functions by name, so this wraps functions that these call.
    Source: torch/nn/utils/clip_grad.py, torch 2.15.

    Args:
        check: function called with whether there is no gradient to clip.
        undo: receives the callbacks that restore the wrapped functions.
    """
    for name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"):
        if hasattr(clip_grad, name):
            function = getattr(clip_grad, name)
            setattr(clip_grad, name, partial(_checked, check, function))
            undo.callback(setattr, clip_grad, name, function)


def _checked(
    check: Callable[[bool], None],
    function: Callable[..., Any],
    tensors: Any,
    *more: Any,
    **keywords: Any,
) -> Any:
    check(isinstance(tensors, list) and not any(len(one) for one in tensors[:1]))
    return function(tensors, *more, **keywords)


def _look(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
