"""The optimizer step that a rank is in: micro-batches, backward passes, clipping and updates.

`session.step` does all of it in one call. A script may also call `session.backward`, and then the
`step` and `zero_grad` of its prepared optimizers, which work as in plain torch.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpctrain.backends.base import Backend
from hpctrain.backends.trained_parameters import reached
from hpctrain.errors import UsageError
from hpctrain.precision.base import Precision
from hpctrain.process.logging import logger
from hpctrain.process.phases import ACCUMULATING, BACKWARD, COMPUTING, UPDATING
from hpctrain.training.context import Context, parameters_of
from hpctrain.training.gradient_guard import (
    GradientGuard,
    no_loss,
    refuse_optimizers,
    refuse_plain_backward,
)
from hpctrain.training.prepared_optimizer import PreparedOptimizer
from hpctrain.training.token_count import TokenCount

__all__ = ["Step"]


class Step:
    """The current optimizer step of this rank, started by `run.batches` and read by the run.

    A step has one or more micro-batches on each rank: bodies of `run.batches` with a backward pass,
    or passes outside of a run. Passes of all but the last one only add gradients up; those of the
    last one also average them over the ranks, and then the optimizers update the weights.

    Invariants:

    - `last` is whether `micro_batch` is the last one; only then do passes communicate.
    - `done` is False at the beginning of a body, and True from the first update in its last
      micro-batch; the step counts then, with several optimizers once.
    - A body without a backward pass is no micro-batch; the next one continues the step.
    - `weight` and the token count belong to one micro-batch.
    - The loss scale changes only where no gradient has the old one: before the next pass, or, while
      micro-batches accumulate, at the end of the step.
    - Gradients of a step that is not complete are in no checkpoint, and `drop` clears them.

    Args:
        context: context of the training.
        undo: restores the classes of schedulers as the session closes.

    Attributes:
        number: steps done in the run.
        in_run: whether a run is open, which counts the steps.
        in_body: whether the script is processing a batch of the run.
        pending: whether the loop has a batch that is not counted yet.
        cut_short: whether `--max-steps` has ended this epoch of the run before its last batch.
        bodies: batches of the run since the last step.
        micro_batch: index of the micro-batch in its step.
        passed: backward passes in this micro-batch.
        last: whether this is the last micro-batch of its step.
        done: whether this batch of the run has ended a step.
        weight: weight of the micro-batch in its step; 1 if all have the same number of samples.
        tokens: what the losses of this step are averaged over, if the script counts it.
        norm: norm of the gradients before they were last clipped, shape (); None without clipping.
        before: what to call before the next backward pass, once; it adds groups to optimizers.
        optimizers: prepared optimizers.
        schedulers: prepared schedulers.
    """

    def __init__(self, context: Context, undo: ExitStack) -> None:
        self._context, self.undo = context, undo
        self._backend, self._precision = context.backend, context.precision
        self._heartbeat = context.events.heartbeat
        self._accumulate = context.batches.accumulate
        self.number = 0
        self.in_run = self.in_body = self.pending = self.done = self.cut_short = False
        self.bodies = self.micro_batch = self.passed = 0
        self.last = self._accumulate == 1
        self.weight = 1.0
        self.tokens = TokenCount(context)
        self.norm: Tensor | None = None
        self.before: list[Callable[[], None]] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[LRScheduler] = []
        self._guard = GradientGuard()
        self._clip_value, self._clip_norm = context.options.clip_value, context.options.clip_norm
        self._clips = self._clip_value is not None or self._clip_norm is not None
        # A step can take microseconds, so avoid calls that do nothing.
        self._attaches = _overrides(self._backend, Backend.attach)
        self._syncs = _overrides(self._backend, Backend.sync_gradients)
        self._clears = _overrides(self._precision, Precision.clear)
        self._need_closures = False
        self._inside = False  # whether an optimizer's methods or torch's clipping are called here
        self._passes = 0  # backward passes since the last step
        self._updated = False  # whether an optimizer has stepped since the loss scale was updated
        self._own = False  # whether the script calls the optimizers itself, in this step
        self._ignored = False  # whether this batch had a call of a scheduler that did not count
        self._warns = _FIRST_STEPS  # passes after an update to look at, for a warning
        self._closed = False

    # Position: called by the run.

    def begin_run(self) -> None:
        """Begin a run at step 0; the run before it may have ended by an error in its loop."""
        self.number = self.bodies = 0
        self.in_body = self.pending = self.done = self.cut_short = False
        self._ignored = self._updated = False
        self.weight, self.norm, self.before = 1.0, None, []
        if self.micro_batch or self.passed:
            self.passed = 0
            self._backend.forget()
            self._clear(self.optimizers)
            self._begin_step()

    def begin_body(self) -> None:
        """Begin a batch of the run."""
        self.in_body = self.pending = True

    def end_body(self) -> bool:
        """Count the batch of the run, and return whether it has ended a step."""
        left_open, self.in_body = self.in_body, False
        ignored = self._ignored and left_open
        self.bodies += 1
        if self.bodies == self._accumulate and not (self.done or self.optimizers):
            self._count()  # nothing tells it of an optimizer that is not prepared
        self.pending, done = False, self.done
        self._end_micro_batch(done)
        self._ignored = ignored
        if done:
            self.done, self.bodies = False, 0
        return done

    def drop(self) -> int:
        """Drop the gradients of an incomplete step, and return its number of micro-batches.

        Raises:
            UsageError: a scheduler stepped in a batch that the loop was left in.
        """
        dropped, self.bodies, self._passes = self.micro_batch, 0, 0
        if dropped:
            self._backend.forget()
            self._clear(self.optimizers)
            self._begin_step()
        if self._ignored:
            self._ignored = False
            raise UsageError("HT605.scheduler-in-open-batch")
        return dropped

    def close(self) -> None:
        """Give the optimizers their own methods back."""
        self._closed = True

    # Preparation: called by the session.

    def watch(self) -> None:
        """Read the prepared models, optimizers and batch size again, after some were added."""
        self._accumulate = self._context.batches.accumulate
        self._guard.watch(self._context)
        prepared = self._context.optimizers
        self.optimizers = [one for one in self.optimizers if one.optimizer in prepared]
        self._need_closures = any(one.needs_closure for one in self.optimizers)
        self._begin_micro_batch(self.micro_batch)

    def wrap(self, optimizer: Optimizer) -> None:
        """Replace `step` and `zero_grad` of an optimizer, until `close`.

        The object stays the same, so schedulers and other references keep working.
        """
        prepared = PreparedOptimizer(optimizer, self._context)
        self.optimizers.append(prepared)

        @wraps(prepared.take_step)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            del optimizer
            if self._inside or self._closed:
                return prepared.take_step() if closure is None else prepared.take_step(closure)
            if closure is not None:
                return self._step_by_closure(prepared, closure)
            return self._step_alone(prepared)

        @wraps(prepared.own_clear)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            del optimizer
            if self._inside or self._closed:
                prepared.own_clear(set_to_none)
            elif self._accumulate == 1 or self._zero(prepared):
                self._clear([prepared], set_to_none)

        # Bound methods, as torch's schedulers expect.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

    # The step: called by the session, and by the script through its optimizers.

    def backward(self, loss: Tensor, count: Any, keywords: dict[str, Any]) -> None:
        """Run the backward pass of a loss; see `Session.backward`."""
        if not self.in_body:
            self._refuse_outside()
            if self._accumulate > 1:
                raise UsageError(
                    "HT605.accumulation-outside-batches", batches=self._context.batches
                )
        if self._accumulate > 1 and not self._own:
            self._own = True
            self._begin_micro_batch(self.micro_batch)
        self._pass(loss, count, keywords)
        self._heartbeat.enter(COMPUTING)

    def step(self, loss: Tensor, optimizers: Sequence[Optimizer]) -> bool:
        """Do backward pass, update and clearing; see `Session.step`."""
        prepared = self.optimizers
        if optimizers or not prepared or self._need_closures:
            refuse_optimizers(self._context, optimizers, prepared)
        if not self.in_body:
            self._refuse_outside()
        guard = self._guard
        if self.micro_batch == self.passed == 0 and (guard.left or guard.sentinel.grad is not None):
            guard.before_step()
        self._pass(loss, None, {})
        if not self.last:
            if not self.in_body:
                self._end_micro_batch(False)
            return False
        if optimizers:
            prepared = [one for one in prepared if one.optimizer in optimizers]
        if self._accumulate > 1:
            self._complete(prepared)
        for one in prepared:
            self._update(one)
        self._update_scale()
        # The loss of one model also leaves gradients in other models that it used.
        self._clear(self.optimizers)
        self._count()
        if not self.in_body:
            self._end_micro_batch(True)
        return True

    def unscale(self, optimizers: Iterable[PreparedOptimizer]) -> None:
        """Remove loss scale and token count from the gradients of optimizers, once in a step."""
        for one in optimizers if self.last else ():
            if self._own:
                one.merge()
            if not one.unscaled:
                one.unscaled = True
                self._precision.unscale(one.optimizer)
                if self.tokens.counts:
                    self.tokens.divide(parameters_of(one.optimizer))

    def unscale_all(self, optimizers: Sequence[Optimizer]) -> None:
        """Remove the loss scale from the gradients of these optimizers, or of all."""
        self.unscale(
            one for one in self.optimizers if not optimizers or one.optimizer in optimizers
        )

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
        self.unscale(
            one
            for one in self.optimizers
            if not wanted.isdisjoint(map(id, parameters_of(one.optimizer)))
        )
        return self._clipped(masters, clip)

    def before_clipping(self, gradients: Sequence[Tensor]) -> None:
        """Check a call of torch's own functions for clipping.

        Args:
            gradients: gradients to clip.

        Raises:
            UsageError: the gradients are applied already, not complete, or have the loss scale.
        """
        if self._inside or not self.in_body:
            return
        if self.done and not gradients:
            raise UsageError("HT604.clipped-after-step")
        if not self.last:
            clipped = set(map(id, gradients))
            if any(id(p.grad) in clipped for one in self.optimizers for p in one.parameters()):
                raise UsageError("HT604.clipped-too-early")
        scaled = self._passes and self._precision.scaler is not None
        if scaled and not any(one.unscaled for one in self.optimizers):
            raise UsageError("HT604.clipped-with-loss-scale", precision=self._precision)
        if self.last:
            self._backend.sync_gradients()  # after the script's own loss.backward()
            for one in self.optimizers if self._own else ():
                one.merge()
            if self.tokens.counts:
                self.unscale(self.optimizers)

    def counts(self, optimizer: Optimizer) -> bool:
        """Return whether a call of a scheduler counts: once for each update of its optimizer.

        Outside of the loop's body every call counts, except at the end of an epoch that is cut
        short: a resumed run gets there again. In the body, those in the last micro-batch of a step
        do, unless the update was skipped.
        """
        if not self.in_body:
            return not self.cut_short
        if not self.last:
            self._ignored = True
            return False
        return all(one.applied for one in self.optimizers if one.optimizer is optimizer)

    def _refuse_outside(self) -> None:
        if self.in_run:
            raise UsageError("HT605.backward-outside-batches")

    def _warn_of_update(self, loss: Tensor) -> None:
        """Warn if a loss may depend on an update that an earlier micro-batch has not made."""
        stepped = [p for one in self.optimizers if one.called for p in one.parameters()]
        if stepped:
            self._warns -= 1
            used = reached(loss)
            if used is None or any(id(p) in used or not p.requires_grad for p in stepped):
                self._warns = 0
                logger.warning(
                    "this loop computes a loss after optimizer.step() in the same body: with %d "
                    "micro-batches in a step, all but the last use weights without this update, so "
                    "the numbers depend on the number of ranks: --accumulate 1",
                    self._accumulate,
                )

    def _pass(self, loss: Tensor, count: Any, keywords: dict[str, Any]) -> None:
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
            raise no_loss(loss)
        if self.passed or self.micro_batch or self._own or self._updated or self.before:
            self._begin_pass(loss)  # not the only pass of a step
        last = self.last
        self._heartbeat.enter(BACKWARD if last else ACCUMULATING)
        if self._attaches:
            loss = self._backend.attach(loss)
        if count is not None or self.tokens.counts:
            loss = self.tokens.weigh(loss, count, self.weight, first=not self._passes)
        else:
            if self.weight != 1.0:
                loss = loss * self.weight
            if self._accumulate > 1:
                loss = loss / self._accumulate
        self._precision.backward(loss, **keywords)
        self._passes += 1
        self.passed += 1
        if not last:
            if self._own:
                for one in self.optimizers:
                    one.after_pass()
            else:
                self._guard.between()
        elif self._syncs:  # else no rank waits for another one between backward pass and update
            self._heartbeat.enter(UPDATING)
            self._backend.sync_gradients()

    def _begin_pass(self, loss: Tensor) -> None:
        """Prepare the gradients for a pass that others of its step precede."""
        while self.before:
            self.before.pop()()
        if self._updated and self._accumulate == 1:
            self._update_scale()
            if not self.in_body:
                self._end_micro_batch(True)
        if self.passed and self._backend.reduction in ("sum", "adasum"):
            raise UsageError("HT607.second-pass", reduction=self._backend.reduction)
        if self._own:
            if self._warns and self.passed:
                self._warn_of_update(loss)
            for one in self.optimizers:
                one.before_pass()
        elif self.micro_batch and not self.passed:
            self._guard.before_micro_batch()

    def _complete(self, optimizers: Iterable[PreparedOptimizer]) -> None:
        """Average what only earlier micro-batches have given, before the updates of a step."""
        if len(self._context.models) > 1:
            self._backend.sync_gradients()
        for one in optimizers:
            if self._own:
                one.finish()
                one.complete(self._accumulate)
            else:
                one.merge()

    def _update(self, one: PreparedOptimizer) -> None:
        """Clip as the options say, and take the optimizer step."""
        optimizer = one.optimizer
        if self._clips or self.tokens.counts:
            self.unscale([one])
        if self.tokens.counts and self.tokens.is_zero():
            one.applied = False
        else:
            if self._clips:
                self._clipped(parameters_of(optimizer), self._clip_by_options)
            self._inside = True
            try:
                self._backend.update(optimizer, self._precision.step)
            finally:
                self._inside = False
            if self.schedulers and self._precision.scaler is not None:
                one.applied = not self._precision.scaler.skipped(optimizer)
        self._updated = True

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

    def _clear(self, optimizers: Iterable[PreparedOptimizer], set_to_none: bool = True) -> None:
        for one in optimizers:
            one.clear() if set_to_none else one.own_clear(set_to_none)
            if self._clears:
                self._precision.clear(one.optimizer)

    def _zero(self, one: PreparedOptimizer) -> bool:
        """Follow `zero_grad` while micro-batches accumulate; return whether to clear."""
        if self._passes and not self._own:
            return False  # session.step clears
        discarded = one.discards
        clears = one.zero()
        if one.discards != discarded:
            self._begin_micro_batch(self.micro_batch)  # fsdp reduces in each pass from now on
        return clears

    def _step_alone(self, one: PreparedOptimizer) -> None:
        """Take a step that the script has called, if the gradients are complete."""
        if not self._passes:
            refuse_plain_backward(self._context, self.weight, one.optimizer)
        if self._accumulate > 1:
            if not self.passed:
                return  # this batch is no micro-batch
            one.finish()
            if not self.last:
                one.keep()
                return
            one.complete(self._accumulate)
        self._heartbeat.enter(UPDATING)
        self._backend.sync_gradients()  # after the script's own loss.backward()
        self._update(one)
        self._count()
        self._heartbeat.enter(COMPUTING)

    def _step_by_closure(self, one: PreparedOptimizer, closure: Callable[[], Any]) -> Any:
        """Take a step that calls the closure as often as it needs to.

        The optimizer decides by the loss, so all ranks have to get the same one: its mean.
        """
        if self._precision.scaler is not None:
            raise UsageError("HT607.closure-with-loss-scale", precision=self._precision)
        if self._accumulate > 1:
            raise UsageError("HT607.closure-with-accumulation", batches=self._context.batches)

        def mean_loss() -> Any:
            loss = closure()
            if self.tokens.counts:
                raise UsageError("HT607.closure-with-count")
            if self._clips:
                self._clipped(parameters_of(one.optimizer), self._clip_by_options)
            if not isinstance(loss, Tensor) or self._backend.world_size == 1:
                return loss
            return self._backend.sum(loss.detach().clone()) / self._backend.world_size

        self._inside = True
        try:
            result = one.take_step(mean_loss)
        finally:
            self._inside = False
        self._updated = True
        self._count()
        return result

    def _count(self) -> None:
        """Count a step of the run, at the first update in its last micro-batch."""
        if self.pending and not self.done:
            self.done = True
            self.number += 1
            self._heartbeat.step = self.number

    def _update_scale(self) -> None:
        """Update the loss scale.

        Several optimizers can use the gradients of one backward pass, with one loss scale. So this
        is called before the next pass, or at the end of the micro-batch.
        """
        self._updated = False
        for one in self.optimizers:
            one.unscaled = False
        self._precision.update()

    def _end_micro_batch(self, done: bool) -> None:
        """Begin the next micro-batch.

        Args:
            done: whether this micro-batch was the last one of its step.
        """
        if self._updated:
            self._update_scale()
        if self.weight != 1.0:
            self.weight = 1.0
        self._ignored = False
        for one in self.optimizers if self.schedulers else ():
            one.applied = True
        if self._own and (done or self.passed):
            for one in self.optimizers:
                if done:
                    one.end_step(self._accumulate)
                else:
                    one.end_micro_batch(self._accumulate if self.last else None)
        if done:
            self.passed = self._passes = 0
            if self.micro_batch or self._own or self.tokens.counts:
                self._begin_step()
        elif self.passed:
            self.passed = 0
            self.tokens.end_micro_batch()
            self._begin_micro_batch(self.micro_batch + 1)

    def _begin_step(self) -> None:
        self._passes = 0
        if self.tokens.counts:
            self.tokens.begin_step()
        if self._own:
            self._own = False
            for one in self.optimizers:
                one.begin_step()
        if self.micro_batch:
            self._begin_micro_batch(0)

    def _begin_micro_batch(self, number: int) -> None:
        """Let only the last micro-batch of a step average the gradients.

        fsdp reduces in each one if there are several models, or if gradients have to be moved
        aside, since those of full weights are in no optimizer.

        Args:
            number: index of the micro-batch in its step.
        """
        self.micro_batch, self.last = number, number + 1 >= self._accumulate
        if self._accumulate > 1:
            wanted = self.last
            if self._backend.sharded and not wanted:
                several = len(self.optimizers) > 1 or any(one.discards for one in self.optimizers)
                # A model may be in the losses of some micro-batches only.
                wanted = len(self._context.models) > 1 or (self._own and several)
            for model in self._context.models:
                self._backend.synchronize(model, wanted)


def _overrides(owner: object, method: Callable[..., Any]) -> bool:
    """Return whether the class of an object has its own version of a base class's method."""
    return getattr(type(owner), method.__name__) is not method


_FIRST_STEPS = 3
