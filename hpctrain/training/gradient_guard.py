"""Checks for calls that falsify gradients: backward(), zero_grad(), clipping, other optimizers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from hpctrain.errors import UsageError
from hpctrain.training.context import Context, parameters_of
from hpctrain.training.prepared_optimizer import PreparedOptimizer, look

__all__ = [
    "GradientGuard",
    "no_loss",
    "refuse_optimizers",
    "refuse_plain_backward",
    "watch_clipping",
]

_STEPS = 3  # a script with such a call makes it in its first steps


class GradientGuard:
    """Check of the gradients between the backward passes of `session.step`.

    It checks one parameter at each step, and all parameters at the first steps.

    Attributes:
        sentinel: parameter that is checked at each step.
        left: steps left at which all parameters are checked.
    """

    def __init__(self) -> None:
        self._named: list[tuple[str, nn.Parameter]] = []
        self.sentinel = nn.Parameter(torch.empty(0), requires_grad=False)
        self.left = 0
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
        if self._named:
            self.sentinel = self._named[-1][1]
        self.left = _STEPS

    def before_step(self) -> None:
        """Check all gradients before the first backward pass of a step.

        Raises:
            UsageError: a gradient is not from `session.step`.
        """
        self.left -= self.left > 0
        for name, parameter in self._named:
            if parameter.grad is not None and float(parameter.grad.detach().abs().sum()):
                raise UsageError("HT604.gradient-before-step", name=name)

    def before_micro_batch(self) -> None:
        """Check the sentinel before the first backward pass of another micro-batch.

        Raises:
            UsageError: its gradient was changed or cleared.
        """
        if self._seen is not None and self._seen != look(self.sentinel.grad):
            raise UsageError("HT604.gradients-cleared")

    def between(self) -> None:
        """Record a gradient after a backward pass that is not the last one of its step."""
        self._seen = look(self.sentinel.grad)


def watch_clipping(check: Callable[[Sequence[Tensor]], None], undo: ExitStack) -> None:
    """Call a function before torch clips gradients.

    Scripts import the two clipping functions by name, so this wraps functions that these call.
    Source: torch/nn/utils/clip_grad.py, torch 2.15.

    Args:
        check: function called with the gradients to clip.
        undo: receives the callbacks that restore the wrapped functions.
    """
    for name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"):
        if hasattr(clip_grad, name):
            function = getattr(clip_grad, name)
            setattr(clip_grad, name, partial(_checked, check, function))
            undo.callback(setattr, clip_grad, name, function)


def _checked(
    check: Callable[[Sequence[Tensor]], None],
    function: Callable[..., Any],
    tensors: Any,
    *more: Any,
    **keywords: Any,
) -> Any:
    parts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    check([one for part in parts for one in ([part] if isinstance(part, Tensor) else part)])
    return function(tensors, *more, **keywords)


def refuse_plain_backward(context: Context, weight: float, optimizer: Optimizer) -> None:
    """Refuse gradients of the script's own loss.backward() that would be wrong.

    Args:
        context: context of the training.
        weight: weight of the micro-batch.
        optimizer: optimizer that is about to step.

    Raises:
        UsageError: the loss needed a scale, a weight, or a part of it.
    """
    features = [
        *(["a loss scale"] if context.precision.scaler is not None else []),
        *(["micro-batches that accumulate"] if context.batches.accumulate > 1 else []),
        *(["micro-batches of different sizes"] if weight != 1.0 else []),
    ]
    if features and any(p.grad is not None for p in parameters_of(optimizer)):
        raise UsageError("HT604.plain-backward", features=" and ".join(features))


def refuse_optimizers(
    context: Context, optimizers: Sequence[Optimizer], prepared: Sequence[PreparedOptimizer]
) -> None:
    """Refuse optimizers that `session.step` cannot step.

    Args:
        context: context of the training.
        optimizers: optimizers that the script has named.
        prepared: prepared optimizers.

    Raises:
        UsageError: one was not prepared, or needs something else than one backward pass.
    """
    accumulate, known = context.batches.accumulate, [one.optimizer for one in prepared]
    if any(one not in known for one in optimizers):
        raise UsageError("HT606.optimizer-not-prepared")
    if not prepared:
        raise UsageError("HT606.no-optimizer")
    if optimizers and accumulate > 1:
        raise UsageError("HT607.optimizer-with-accumulation", accumulate=accumulate)
    for one in prepared:
        if one.needs_closure and (not optimizers or one.optimizer in optimizers):
            raise UsageError("HT607.closure-needed", kind=type(one.optimizer).__name__)


def no_loss(loss: Any) -> UsageError:
    """Return the error for an object that is no single number with a gradient."""
    if not isinstance(loss, Tensor):
        return UsageError("HT608.loss-is-no-tensor", kind=type(loss).__name__)
    if loss.numel() != 1:
        return UsageError("HT608.loss-is-no-scalar", shape=tuple(loss.shape))
    return UsageError("HT608.loss-without-gradient")
