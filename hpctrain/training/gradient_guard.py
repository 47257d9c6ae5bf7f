"""Checks for calls that falsify gradients: backward(), zero_grad(), clipping, other optimizers."""

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from hpctrain.errors import UsageError
from hpctrain.training.context import Context, parameters_of

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
                raise UsageError("HT604.gradients-cleared")
        elif self._left or sentinel.grad is not None:
            self._left -= self._left > 0
            for name, parameter in self._named:
                if parameter.grad is not None and float(parameter.grad.detach().abs().sum()):
                    raise UsageError("HT604.gradient-before-step", name=name)

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


def refuse_plain_backward(context: Context, optimizer: Optimizer) -> None:
    """Refuse gradients of the script's own loss.backward() that would be wrong.

    Args:
        context: context of the training.
        optimizer: optimizer that is about to step.

    Raises:
        UsageError: the loss needed a scale, a weight, or a part of it.
    """
    features = [
        *(["a loss scale"] if context.precision.scaler is not None else []),
        *(["micro-batches that accumulate"] if context.batches.accumulate > 1 else []),
        *(["micro-batches of different sizes"] if context.weight != 1.0 else []),
    ]
    if features and any(p.grad is not None for p in parameters_of(optimizer)):
        raise UsageError("HT604.plain-backward", features=" and ".join(features))


def refuse_optimizers(
    context: Context, optimizers: Sequence[Optimizer], need_closure: Container[int]
) -> None:
    """Refuse optimizers that `session.step` cannot step.

    Args:
        context: context of the training.
        optimizers: optimizers that the script has named.
        need_closure: ids of optimizers that call a closure.

    Raises:
        UsageError: one was not prepared, or needs something else than one backward pass.
    """
    prepared, accumulate = context.optimizers, context.batches.accumulate
    if any(one not in prepared for one in optimizers):
        raise UsageError("HT606.optimizer-not-prepared")
    if not prepared:
        raise UsageError("HT606.no-optimizer")
    if optimizers and accumulate > 1:
        raise UsageError("HT607.optimizer-with-accumulation", accumulate=accumulate)
    for optimizer in optimizers or prepared:
        if id(optimizer) in need_closure:
            raise UsageError("HT607.closure-needed", kind=type(optimizer).__name__)


def no_loss(loss: Any) -> UsageError:
    """Return the error for an object that is no single number with a gradient."""
    if not isinstance(loss, Tensor):
        return UsageError("HT608.loss-is-no-tensor", kind=type(loss).__name__)
    if loss.numel() != 1:
        return UsageError("HT608.loss-is-no-scalar", shape=tuple(loss.shape))
    return UsageError("HT608.loss-without-gradient")


def _look(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
