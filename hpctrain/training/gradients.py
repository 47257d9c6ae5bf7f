"""Gradients of a training: backward passes, clipping and optimizer steps.

`session.step` does all of it in one call. A script may also call `session.backward`, and then the
`step` and `zero_grad` of its prepared optimizers, which work as in plain torch.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.precision.base import Precision
from hpctrain.process.phases import ACCUMULATING, BACKWARD, COMPUTING, UPDATING
from hpctrain.training.context import Context, parameters_of
from hpctrain.training.gradient_guard import (
    GradientGuard,
    no_loss,
    refuse_optimizers,
    refuse_plain_backward,
)

__all__ = ["Gradients"]


class Gradients:
    """Gradients of the prepared models, from the backward pass to the optimizer step.

    A step has one or more micro-batches on each rank. Backward passes of all but the last one only
    add gradients up; those of the last one also average them over the ranks. Until then, `step` and
    `zero_grad` of an optimizer do nothing.

    Args:
        context: context of the training.

    Attributes:
        last: whether this is the last micro-batch of its step.
        norm: norm of the gradients before they were last clipped, shape (); None without clipping.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._backend, self._precision = context.backend, context.precision
        self._guard = GradientGuard()
        self.norm: Tensor | None = None
        self._micro_batch = 0  # number of micro-batches done in the current step
        self.last = context.batches.accumulate == 1
        self._clip_value, self._clip_norm = context.options.clip_value, context.options.clip_norm
        self._clips = self._clip_value is not None or self._clip_norm is not None
        # A step can take microseconds, so avoid calls that do nothing.
        self._attaches = _overrides(self._backend, Backend.attach)
        self._syncs = _overrides(self._backend, Backend.sync_gradients)
        self._clears = _overrides(self._precision, Precision.clear)
        self._inside = False  # whether an optimizer's methods or torch's clipping are called here
        self._passes = 0  # backward passes since the last step
        self._passed = False  # whether this micro-batch had a backward pass
        self._stepped = False  # whether an optimizer has stepped since the last pass
        self._applied: set[int] = set()  # ids of optimizers that stepped in this micro-batch
        self._unscaled: set[int] = set()  # ids of optimizers whose gradients have no loss scale
        self._need_closure: set[int] = set()
        self._clear_own: dict[int, Callable[[], None]] = {}  # by id of the optimizer
        self._closed = False

    def watch(self) -> None:
        """Read the prepared models and optimizers again, after some were added."""
        self._guard.watch(self._context)
        self._begin_micro_batch(self._micro_batch)

    def adopt(self, optimizer: Optimizer) -> None:
        """Replace `step` and `zero_grad` of an optimizer, until `close`.

        The object stays the same, so schedulers and other references keep working.
        """
        own_step, own_clear = optimizer.step, optimizer.zero_grad
        closure = inspect.signature(own_step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            self._need_closure.add(id(optimizer))
        plain = getattr(own_clear, "__func__", None) is Optimizer.zero_grad
        self._clear_own[id(optimizer)] = partial(_clear, optimizer) if plain else own_clear

        @wraps(own_step)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self._inside or self._closed:
                return own_step() if closure is None else own_step(closure)
            if closure is not None:
                return self._step_by_closure(own_step, closure)
            return self._step_alone(optimizer)

        @wraps(own_clear)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if self._inside or self._closed or not set_to_none:
                own_clear(set_to_none)
            elif not self._accumulates(optimizer):
                self._clear([optimizer])

        # Bound methods, as torch's schedulers expect.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """Run the backward pass of a loss; see `Session.backward`."""
        context = self._context
        if not context.in_body and context.batches.accumulate > 1:
            raise UsageError("HT605.accumulation-outside-batches", batches=context.batches)
        context.events.backward()
        self._pass(loss, keywords)
        context.events.phase(COMPUTING)

    def step(self, loss: Tensor, optimizers: Sequence[Optimizer]) -> bool:
        """Do backward pass, update and clearing; see `Session.step`."""
        context = self._context
        prepared = context.optimizers
        if optimizers or not prepared or self._need_closure:
            refuse_optimizers(context, optimizers, self._need_closure)
        context.events.backward()
        if self._micro_batch == 0 and not self._passed:
            self._guard.before(True)
        self._pass(loss, {})
        if not self.last:
            if not context.in_body:
                self.end_micro_batch(False)
            return False
        for optimizer in optimizers or prepared:
            self._update(optimizer)
        self.end_step()
        # The loss of one model also leaves gradients in other models that it used.
        self._clear(prepared)
        context.events.stepped()
        if not context.in_body:
            self.end_micro_batch(True)
        return True

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Remove the loss scale from the gradients of optimizers, once in a step."""
        for optimizer in optimizers if self.last else ():
            if id(optimizer) not in self._unscaled:
                self._unscaled.add(id(optimizer))
                self._precision.unscale(optimizer)

    def clip(
        self,
        parameters: Tensor | Iterable[Tensor],
        clip: Callable[[Sequence[Tensor]], Tensor | None],
    ) -> Tensor | None:
        """Call one of torch's functions for clipping on gradients without a loss scale.

        Args:
            parameters: parameters of prepared models.
            clip: function of the tensors that the optimizers update.

        Returns:
            What the function returns; None between the micro-batches of a step.
        """
        if not self.last:
            return None
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        masters = [self._precision.master(parameter) for parameter in given]
        wanted = set(map(id, masters))
        self._backend.sync_gradients()
        concerned = [
            optimizer
            for optimizer in self._context.optimizers
            if not wanted.isdisjoint(map(id, parameters_of(optimizer)))
        ]
        self.unscale(concerned)
        return self._clipped(masters, clip)

    def before_clipping(self, finds_none: bool) -> None:
        """Check a call of torch's own functions for clipping.

        Args:
            finds_none: whether there is no gradient to clip.

        Raises:
            UsageError: the gradients are applied already, or have the loss scale.
        """
        context = self._context
        if self._inside or not context.in_body:
            return
        if finds_none and context.stepped:
            raise UsageError("HT604.clipped-after-step")
        if self._precision.scaler is not None and self._passes and not self._unscaled:
            raise UsageError("HT604.clipped-with-loss-scale", precision=self._precision)
        if self.last:
            self._backend.sync_gradients()  # after the script's own loss.backward()

    def end_step(self) -> None:
        """Update the loss scale.

        Several optimizers can use the gradients of one backward pass, with one loss scale. So this
        is called before the next pass, or at the end of the micro-batch.
        """
        if self._stepped:
            self._stepped = False
            if self._unscaled:
                self._unscaled.clear()
            self._precision.update()

    def end_micro_batch(self, stepped: bool) -> None:
        """Begin the next micro-batch.

        Args:
            stepped: whether this micro-batch was the last one of its step.
        """
        if self._stepped:
            self.end_step()
        if self._context.weight != 1.0:
            self._context.weight = 1.0
        following = 0 if stepped else self._micro_batch + self._passed
        if stepped:
            self._passes = 0
        self._passed = False
        if self._applied:
            self._applied.clear()
        if following != self._micro_batch:
            self._begin_micro_batch(following)

    def forget(self) -> int:
        """Drop the gradients of an incomplete step, and return its number of micro-batches."""
        dropped, self._passes = self._micro_batch, 0
        if dropped:
            self._backend.forget()
            self._clear(self._context.optimizers)
            self._begin_micro_batch(0)
        return dropped

    def close(self) -> None:
        """Give the optimizers their own methods back."""
        self._closed = True

    def _pass(self, loss: Tensor, keywords: dict[str, Any]) -> None:
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
            raise no_loss(loss)
        context = self._context
        if self._stepped:
            self.end_step()
        if self._micro_batch and not self._passed:
            self._guard.before(False)
        last, accumulate = self.last, context.batches.accumulate
        context.events.phase(BACKWARD if last else ACCUMULATING)
        if self._attaches:
            loss = self._backend.attach(loss)
        if context.weight != 1.0:
            loss = loss * context.weight
        self._precision.backward(loss if accumulate == 1 else loss / accumulate, **keywords)
        self._passes += 1
        self._passed = True
        if not last:
            self._guard.between()
        elif self._syncs:  # else no rank waits for another one between backward pass and update
            context.events.phase(UPDATING)
            self._backend.sync_gradients()

    def _update(self, optimizer: Optimizer) -> None:
        """Clip as the options say, and take the optimizer step."""
        if self._clips:
            self.unscale([optimizer])
            self._clipped(parameters_of(optimizer), self._clip_by_options)
        self._inside = True
        try:
            self._backend.update(optimizer, self._precision.step)
        finally:
            self._inside = False
        self._stepped = True
        if self._context.batches.accumulate > 1:
            self._applied.add(id(optimizer))

    def _clip_by_options(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Clip each element first, then the norm of all parameters of an optimizer."""
        if self._clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self._clip_value)
        if self._clip_norm is None:
            return None
        return nn.utils.clip_grad_norm_(parameters, self._clip_norm)

    def _clipped(
        self, parameters: Sequence[Tensor], clip: Callable[[Sequence[Tensor]], Tensor | None]
    ) -> Tensor | None:
        self._inside = True
        try:
            norm = clip(parameters)
        finally:
            self._inside = False
        if norm is not None:
            self.norm = norm = self._backend.whole(norm)
        return norm

    def _clear(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._clear_own[id(optimizer)]()
            if self._clears:
                self._precision.clear(optimizer)

    def _accumulates(self, optimizer: Optimizer) -> bool:
        """Check whether an optimizer has gradients of a step that is not complete."""
        context = self._context
        return (
            context.batches.accumulate > 1
            and (self._passed or self._micro_batch > 0)
            and id(optimizer) not in self._applied
        )

    def _step_alone(self, optimizer: Optimizer) -> None:
        """Take a step that the script has called, if the gradients are complete."""
        if not self._passes:
            refuse_plain_backward(self._context, optimizer)
        if not self.last:
            return
        events = self._context.events
        events.phase(UPDATING)
        self._backend.sync_gradients()  # after the script's own loss.backward()
        self._update(optimizer)
        events.stepped()
        events.phase(COMPUTING)

    def _step_by_closure(self, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Take a step that calls the closure as often as it needs to.

        The optimizer decides by the loss, so all ranks have to get the same one: its mean.
        """
        context = self._context
        if self._precision.scaler is not None:
            raise UsageError("HT607.closure-with-loss-scale", precision=self._precision)
        if context.batches.accumulate > 1:
            raise UsageError("HT607.closure-with-accumulation", batches=context.batches)

        def mean_loss() -> Any:
            loss = closure()
            if not isinstance(loss, Tensor) or self._backend.world_size == 1:
                return loss
            return self._backend.sum(loss.detach().clone()) / self._backend.world_size

        self._inside = True
        try:
            result = step(mean_loss)
        finally:
            self._inside = False
        self._stepped = True
        context.events.stepped()
        return result

    def _begin_micro_batch(self, number: int) -> None:
        """Let only the last micro-batch of a step average the gradients.

        Args:
            number: index of the micro-batch in its step.
        """
        accumulate = self._context.batches.accumulate
        self._micro_batch, self.last = number, number + 1 >= accumulate
        if accumulate > 1:
            for model in self._context.models:
                self._backend.synchronize(model, self.last)


def _overrides(owner: object, method: Callable[..., Any]) -> bool:
    """Return whether the class of an object has its own version of a base class's method."""
    return getattr(type(owner), method.__name__) is not method


def _clear(optimizer: Optimizer) -> None:
    """Clear gradients as torch's `zero_grad` does, which also opens a range of the profiler.

    That range takes ten times as long as the rest.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
