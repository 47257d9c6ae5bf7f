"""Schedulers of torch, which are found and saved with their optimizers."""

import gc
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpctrain.errors import UsageError

__all__ = ["attached", "put_back_rates", "scheduled"]


def scheduled(optimizer: Optimizer) -> bool:
    """Return whether one of torch's schedulers was made for an optimizer.

    Source: `patch_track_step_called` in torch/optim/lr_scheduler.py, torch 2.15.
    """
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def attached(
    optimizers: Sequence[Optimizer], excluded: Iterable[object] = ()
) -> dict[str, LRScheduler]:
    """Return torch's schedulers of the optimizers, by name for a checkpoint.

    An optimizer has no reference to its schedulers, so the garbage collector is used to find the
    objects that refer to the optimizer.

    Args:
        optimizers: prepared optimizers.
        excluded: schedulers to leave out, because they are saved elsewhere.

    Raises:
        UsageError: an optimizer has two schedulers of one kind, so their names would be equal.
    """
    found = _outermost(optimizers)
    if len({scheduler.optimizer for scheduler in found}) < len(found):
        # An old one may remain in a reference cycle, as after a notebook cell was run twice.
        found.clear()
        gc.collect()
        found = _outermost(optimizers)
    elsewhere = {id(scheduler) for scheduler in excluded}
    found = [scheduler for scheduler in found if id(scheduler) not in elsewhere]
    named: dict[str, LRScheduler] = {}
    for number, optimizer in enumerate(optimizers):
        for scheduler in found:
            if scheduler.optimizer is optimizer:
                name = f"{type(scheduler).__name__} of optimizer {number}"
                if name in named:
                    raise UsageError("HT412.same-class", kind=type(scheduler).__name__)
                named[name] = scheduler
    return named


def _outermost(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    """Return the schedulers of the optimizers that are not part of another one."""
    found = _schedulers_of(optimizers)
    inside = {id(part) for scheduler in found for part in getattr(scheduler, "_schedulers", ())}
    return [scheduler for scheduler in found if id(scheduler) not in inside]


def _schedulers_of(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    """Return the schedulers of the optimizers: objects with an optimizer as an attribute."""
    referrers = gc.get_referrers(*optimizers)
    dictionaries = [referrer for referrer in referrers if type(referrer) is dict]
    if dictionaries:
        referrers += gc.get_referrers(*dictionaries)
    # Not isinstance, which reads the attribute __class__ of some objects.
    found = {id(obj): obj for obj in referrers if issubclass(type(obj), LRScheduler)}
    known = {id(optimizer) for optimizer in optimizers}
    return [
        scheduler
        for scheduler in found.values()
        if id(getattr(scheduler, "optimizer", None)) in known
    ]


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
