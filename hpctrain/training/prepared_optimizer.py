"""Prepared optimizers, and what the micro-batches of a step have given each of them."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.process.pytree import map_tensors
from hpctrain.training.context import Context, parameters_of

__all__ = ["PreparedOptimizer", "look", "prepare_optimizer"]


class PreparedOptimizer:
    """An optimizer whose `step` and `zero_grad` know the micro-batches of a step.

    A micro-batch gives the optimizer what its backward passes add between `zero_grad` and `step`,
    or up to the end of the loop body if the script steps only in the last micro-batch. So what a
    pass adds after `step`, such as the gradients that a generator's loss leaves in its critic, must
    not stay. `before_pass` moves the finished gradients aside before such a pass; then `zero_grad`
    drops what came since, and moves them back. A loop with one optimizer moves nothing.

    Invariants, for a step with several micro-batches:

    - `aside` is None, or has the finished gradients of the step; then the parameters' gradients are
      what came since.
    - `finished` is whether earlier micro-batches of the step have given gradients.
    - `stepped` is whether the script has called `step`, and not `zero_grad` since.
    - In the last micro-batch, the finished gradients are in the parameters before a pass, which
      averages them. If the script drops gradients before its `step` (`discards`), they stay aside,
      and `merge` averages them.

    Args:
        optimizer: optimizer, prepared by `prepare_optimizer`.
        context: context of the training.

    Attributes:
        take_step, clear: the optimizer's own `step` and `zero_grad`.
        needs_closure: whether `step` has to get a closure.
        unscaled: whether the gradients of this step have no loss scale any more.
        called: whether the script has called `step` in this micro-batch.
        updated: whether `step` has updated the weights in this micro-batch.
        applied: whether the last update changed the weights; False after an overflow.
        discards: whether the script drops gradients before its `step`.
    """

    def __init__(self, optimizer: Optimizer, context: Context) -> None:
        self.optimizer, self._context = optimizer, context
        self.take_step, own_clear = optimizer.step, optimizer.zero_grad
        closure = inspect.signature(self.take_step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        plain = getattr(own_clear, "__func__", None) is Optimizer.zero_grad
        self.clear: Any = partial(_clear, optimizer) if plain else own_clear
        self.own_clear = own_clear
        self.unscaled = self.called = self.updated = self.discards = False
        self.applied = True
        self._calls = 0  # earlier micro-batches of this step in which the script called `step`
        self._finished = self._stepped = False
        self._added = False  # whether a pass came since `zero_grad`, `step` or the last micro-batch
        self._aside: list[Tensor | None] | None = None
        self._seen: list[tuple[int, int] | None] | None = None  # gradients before passes
        self._left: list[tuple[int, int] | None] | None = None  # those after the last micro-batch
        self._passed: list[tuple[int, int] | None] | None = None  # those after the last pass

    def parameters(self) -> list[Tensor]:
        """Return the parameters that get the gradients; under O2 the copies of the masters."""
        precision = self._context.precision
        return [precision.copy_of(parameter) for parameter in parameters_of(self.optimizer)]

    def before_pass(self) -> None:
        """Move finished gradients aside if the pass may add some that are to be dropped.

        Raises:
            UsageError: the script has changed or cleared gradients since the last micro-batch.
        """
        if self._left is not None and self._aside is None and self._left != self._looks():
            raise UsageError("HT604.gradients-cleared")
        self._left = None
        if self.updated:
            if self._calls == 0:
                self._remember()
        elif self._aside is None:
            if self._finished and (self.called or self._stepped or self.discards):
                aside = self._exchange(None)
                if self._context.backend.buffers_gradients:
                    aside = [None if one is None else one.clone() for one in aside]
                self._aside = aside
            elif self._finished:
                self._remember()
        self._added = True

    def after_pass(self) -> None:
        """Record the gradients of a micro-batch before the last one: `step` takes them as they are.

        The script may change gradients in the last micro-batch alone, where they are complete.
        """
        self._passed = self._looks()

    def zero(self) -> bool:
        """Follow `zero_grad` within a step; return whether to clear the gradients.

        Raises:
            UsageError: it would drop a part of what earlier micro-batches gave.
        """
        stepped, self._stepped, self._passed = self._stepped, False, None
        if self.updated:
            self.refuse_late()
            return True
        added, self._added = self._added, False
        if self._aside is not None:
            restored = None if self.discards else self._aside
            self._exchange(restored)
            self._aside = None if restored else self._aside
        elif not self._finished:
            if added and not stepped:
                sharded = self._context.backend.sharded
                if sharded:
                    self._context.backend.forget()
                self.discards |= sharded or any(p.grad is not None for p in self.parameters())
            return True
        elif added and self._changed():
            raise UsageError("HT604.dropped-late", kind=type(self.optimizer).__name__)
        self._seen = None
        return False

    def finish(self) -> None:
        """Follow `step` within a step: what the micro-batch has added belongs to the optimizer.

        Raises:
            UsageError: the script has called `step` in this micro-batch before, has not called
                `zero_grad` since, or has changed gradients.
        """
        passed, self._passed = self._passed, None
        if passed is not None and passed != self._looks():
            raise UsageError("HT604.gradients-cleared")
        kind = type(self.optimizer).__name__
        if self.called:
            raise UsageError("HT607.steps-twice", kind=kind, batches=self._context.batches)
        if self._stepped:
            raise UsageError("HT604.no-zero-grad", kind=kind)
        self.called = self._stepped = True
        self._added, self._seen = False, None

    def keep(self) -> None:
        """Add what came since `zero_grad` to the finished gradients."""
        if self._aside is not None:
            self._exchange([_sum(a, b) for a, b in zip(self._aside, self._live(), strict=True)])
            self._aside = None
        self._finished = True

    def complete(self, micro_batches: int) -> None:
        """Begin an update in the last micro-batch of a step.

        Args:
            micro_batches: number of micro-batches of a step.

        Raises:
            UsageError: the script called `step` in some of the other micro-batches only.
        """
        self.refuse_some(micro_batches)
        self.merge()
        self.updated = True

    def merge(self) -> None:
        """Average gradients that no pass of the last micro-batch has averaged; add those aside."""
        if len(self._context.models) > 1:
            rest = self._context.backend.take_unaveraged(self.parameters())
            if rest:
                gradients = [parameter.grad for parameter in rest]
                average(self._context.backend, rest, gradients)
                for parameter, gradient in zip(rest, gradients, strict=True):
                    parameter.grad = gradient
        if self._aside is not None:
            kept, self._aside = self._aside, None
            average(self._context.backend, self.parameters(), kept)
            self._exchange([_sum(a, b) for a, b in zip(self._live(), kept, strict=True)])

    def refuse_some(self, micro_batches: int) -> None:
        """Refuse `step` in some micro-batches of a step that are not just the last one."""
        if 0 < self._calls < micro_batches - 1 or (self._calls and not self.called):
            kind, calls = type(self.optimizer).__name__, self._calls + self.called
            values = {"kind": kind, "calls": calls, "micro_batches": micro_batches}
            raise UsageError("HT607.stepped-in-some", **values)

    def refuse_late(self) -> None:
        """Refuse gradients that a pass added after an update which earlier steps did not show.

        In the micro-batches without a call of `step`, the same pass has added to its gradients.
        """
        if self._seen is not None and self._changed():
            raise UsageError("HT604.added-after-step", kind=type(self.optimizer).__name__)
        self._seen = None

    def end_micro_batch(self, micro_batches: int | None) -> None:
        """End a micro-batch with a backward pass that has not ended its step.

        Args:
            micro_batches: number of micro-batches of a step, if it could have ended it.

        Raises:
            UsageError: as for `complete`.
        """
        self._passed = None
        if micro_batches is not None:
            self.refuse_some(micro_batches)
        if self._aside is not None and not any(one is not None for one in self._live()):
            self._exchange(self._aside)
            self._aside = None
        if not self.called and self._added:
            self.keep()
        self._calls += self.called
        self._finished = True
        self.called = self._added = False
        self._seen = None
        self._left = self._looks() if self._aside is None else None

    def end_step(self, micro_batches: int) -> None:
        """End the last micro-batch of a step.

        Args:
            micro_batches: number of micro-batches of a step.

        Raises:
            UsageError: the script called `step` in another micro-batch only, or passes after it
                added gradients that the other micro-batches did not drop.
        """
        if self.updated:
            self.refuse_late()
        else:
            self.refuse_some(micro_batches)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what micro-batches have given."""
        self.called = self.updated = self._finished = self._added = False
        self._calls, self._aside, self._seen, self._left = 0, None, None, None

    def _live(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters()]

    def _exchange(self, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        """Set the gradients of all parameters, and return those before; no tensor is copied."""
        parameters = self.parameters()
        before = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(
            parameters, gradients or [None] * len(parameters), strict=True
        ):
            parameter.grad = gradient
        return before

    def _remember(self) -> None:
        if self._seen is None:
            self._seen = self._looks()

    def _changed(self) -> bool:
        return self._seen != self._looks()

    def _looks(self) -> list[tuple[int, int] | None]:
        """Return what shows whether gradients are replaced or changed in place."""
        return [look(gradient) for gradient in self._live()]


def average(backend: Backend, parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Average gradients that no backward pass has averaged, in place; called by all ranks.

    Args:
        backend: backend of the ranks.
        parameters: parameters of the gradients.
        gradients: gradients of this rank; None that another rank has becomes a tensor.
    """
    if backend.sharded or backend.world_size == 1:  # each of fsdp's passes has averaged them
        return
    there = torch.tensor([float(g is not None) for g in gradients], device=backend.device)
    for number, used in enumerate(backend.sum(there).tolist()):
        if used:
            own = gradients[number]
            total = torch.zeros_like(parameters[number]) if own is None else own.contiguous()
            gradients[number] = backend.sum(total)
            if backend.reduction == "mean":
                total /= backend.world_size


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Add to a gradient, in place if possible: torch's clipping may have it already."""
    if total is None or more is None:
        return more if total is None else total
    return total + more if total.is_sparse else total.add_(more)


def look(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return what shows whether a gradient is replaced or changed in place."""
    return None if gradient is None else (id(gradient), gradient._version)


def _clear(optimizer: Optimizer) -> None:
    """Clear gradients as torch's `zero_grad` does, which also opens a range of the profiler.

    That range takes ten times as long as the rest.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def prepare_optimizer(optimizer: Optimizer, context: Context) -> None:
    """Prepare an optimizer for training with the other ranks, with the state of rank 0.

    Args:
        optimizer: optimizer, changed in place.
        context: context of the training, with the optimizers that were prepared before. Those with
            the same parameters are replaced.

    Raises:
        UsageError: the optimizer has parameters of no prepared model.
    """
    context.backend.adopt(optimizer)
    _refuse_parameters(optimizer, context)
    context.precision.adopt(optimizer)
    _share_state(optimizer, context.backend)
    _remove_replaced(optimizer, context.optimizers)
    context.optimizers.append(optimizer)


def _refuse_parameters(optimizer: Optimizer, context: Context) -> None:
    """Refuse parameters that are in no prepared model."""
    known = {parameter for model in context.models for parameter in model.parameters()}
    unprepared = [p for p in parameters_of(optimizer) if p not in known]
    if unprepared:
        raise UsageError(
            "HT606.parameters-not-prepared", count=len(unprepared), kind=type(optimizer).__name__
        )


def _remove_replaced(optimizer: Optimizer, others: list[Optimizer]) -> None:
    """Remove the other optimizers that step on the same parameters, with a warning for each."""
    own = set(map(id, parameters_of(optimizer)))
    for other in [one for one in others if not own.isdisjoint(map(id, parameters_of(one)))]:
        others.remove(other)
        logger.warning(
            "a %s takes the place of the %s that was prepared for the same parameters",
            type(optimizer).__name__,
            type(other).__name__,
        )


def _share_state(optimizer: Optimizer, backend: Backend) -> None:
    """Load the optimizer state of rank 0 on every rank; usually there is none yet."""
    own = optimizer.state_dict() if backend.rank == 0 and optimizer.state else None
    state = backend.broadcast_object(map_tensors(Tensor.cpu, own))
    if state is not None:
        optimizer.load_state_dict(state)  # which moves it to the device of the weights
