"""Prepared schedulers: they count the steps of the run, and are in its checkpoints."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpctrain.errors import UsageError
from hpctrain.training.step import Step

__all__ = ["named", "prepare_scheduler", "put_back_rates", "refuse_unknown", "scheduled"]


def prepare_scheduler(scheduler: LRScheduler, step: Step) -> None:
    """Let `scheduler.step` count in the last micro-batch of a step only, until the session closes.

    The object stays the same. Its class becomes a subclass, because a scheduler's `state_dict()`
    has all attributes of the object.

    Args:
        scheduler: scheduler of a prepared optimizer.
        step: step of the session; see `Step.counts`.

    Raises:
        UsageError: its optimizer was not prepared.
    """
    kind = type(scheduler)
    if any(scheduler is one for one in step.schedulers):
        return
    if not any(scheduler.optimizer is one.optimizer for one in step.optimizers):
        raise UsageError("HT606.scheduler-without-optimizer", kind=kind.__name__)

    def count(self: LRScheduler, *values: Any, **keywords: Any) -> None:
        if step.counts(self.optimizer):
            kind.step(self, *values, **keywords)

    names = {"step": count, "__module__": kind.__module__, "__doc__": kind.__doc__}
    scheduler.__class__ = type(kind.__name__, (kind,), names)
    step.undo.callback(setattr, scheduler, "__class__", kind)
    step.schedulers.append(scheduler)


def scheduled(optimizer: Optimizer) -> bool:
    """Return whether one of torch's schedulers was made for an optimizer."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def named(
    schedulers: Iterable[LRScheduler], optimizers: Sequence[Optimizer], excluded: Iterable[object]
) -> dict[str, LRScheduler]:
    """Return prepared schedulers by their names in a checkpoint.

    Args:
        schedulers: prepared schedulers.
        optimizers: prepared optimizers.
        excluded: objects that have another name in the checkpoint.

    Raises:
        UsageError: an optimizer has two schedulers of one class, so their names would be equal.
    """
    elsewhere = {id(one) for one in excluded}
    found: dict[str, LRScheduler] = {}
    for scheduler in schedulers:
        places = [n for n, one in enumerate(optimizers) if one is scheduler.optimizer]
        if places and id(scheduler) not in elsewhere:
            name = f"{type(scheduler).__name__} of optimizer {places[0]}"
            if name in found:
                raise UsageError("HT412.same-class", kind=type(scheduler).__name__)
            found[name] = scheduler
    return found


def refuse_unknown(optimizers: Iterable[Optimizer], objects: Iterable[object]) -> None:
    """Refuse an optimizer with a scheduler that the run does not know.

    A scheduler leaves `initial_lr` in the groups of its optimizer, except `ReduceLROnPlateau`.

    Args:
        optimizers: prepared optimizers.
        objects: prepared schedulers, and objects of the run's state.

    Raises:
        UsageError: no object is a scheduler of an optimizer that has had one.
    """
    known = {id(getattr(one, "optimizer", None)) for one in objects}
    for optimizer in optimizers:
        if scheduled(optimizer) and id(optimizer) not in known:
            raise UsageError("HT412.unknown-scheduler", kind=type(optimizer).__name__)


def put_back_rates(scheduler: LRScheduler) -> None:
    """Set the rates of a loaded scheduler's optimizer to the scheduler's last rates."""
    try:
        rates = scheduler.get_last_lr()
    except AttributeError:  # a class of the user that does not keep its rates
        return
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = float(rate)
