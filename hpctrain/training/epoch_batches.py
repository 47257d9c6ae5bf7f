"""Batches of an epoch: what is left of any loader of a script, on this rank."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hpctrain.data import own_loaders
from hpctrain.data.feed import feed
from hpctrain.data.loader import Loader, weighed
from hpctrain.data.sampler import TrainingSampler
from hpctrain.data.shared_order import Shared
from hpctrain.data.shared_stream import end_together
from hpctrain.errors import UsageError
from hpctrain.training.consensus import meet, on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.step import Step

__all__ = ["begin", "refuse_other_data"]


def begin(
    loader: Iterable[Any],
    context: Context,
    step: Step,
    epoch: int,
    first: int,
    state: Any,
    see_samples: Callable[[int], None],
) -> tuple[Iterator[Any], int | None]:
    """Return the remaining batches of an epoch, and the number of steps in a full epoch.

    Called by all ranks.

    Args:
        loader: loader of `session.loader()`, or any other iterable of batches.
        context: context of the training.
        step: step of the session.
        epoch: index of the epoch, from 0.
        first: number of micro-batches of this rank that are done.
        state: saved state of a loader of the script; None without one.
        see_samples: called with the number of samples in the first batch of a loader of the script.
    """
    events, shared = context.events, None
    context.stream = None
    for sampler in context.samplers:  # also those of loaders that the script has wrapped
        sampler.epoch, sampler.first = epoch, 0
    inner = own_loaders.without_bar(loader)
    length: int | None
    if isinstance(inner, range):
        loader = inner[first:]
        length = len(inner) // context.batches.accumulate
    elif isinstance(inner, Loader) and isinstance(inner.sampler, TrainingSampler):
        inner.resize()
        inner.sampler.first = first
        length = inner.sampler.steps
    else:
        shared = _share(loader, inner, context, epoch, first, state)
        length = shared.steps
        loader = shared if inner is loader else loader  # a bar has it inside
    steps = "some" if length is None else length
    meet(context.backend, f"the batches of epoch {epoch + 1}, {steps} steps", events)
    if shared is None:
        return iter(loader), length
    iterator = feed(iter(loader), context.placement)
    if shared.unequal:
        iterator = end_together(iterator, context.backend, events)
    return _looked_at(weighed(iterator, events), step, see_samples), length


def _share(loader: Any, inner: Any, context: Context, epoch: int, first: int, state: Any) -> Shared:
    """Return a loader of the script as the ranks share it, at its place in this epoch.

    Args:
        loader: any iterable of batches.
        inner: what is in the loader, if it is a tqdm bar, else the loader.
        context, epoch, first, state: as for `begin`.
    """
    doing = f"the batches of epoch {epoch + 1} of a loader of the script"
    meet(context.backend, doing, context.events)
    shared = context.share(inner)
    own_loaders.check_own(shared.source, context.options, context.batches, shared.parts)
    shared.begin(epoch, first, state if first else None)
    context.stream = shared
    if inner is not loader:
        loader.iterable = shared
        if shared.steps is not None:
            loader.total = shared.steps * context.batches.accumulate - first
    return shared


def _looked_at(
    batches: Iterator[Any], step: Step, see_samples: Callable[[int], None]
) -> Iterator[Any]:
    """Yield the batches of a loader created by the script; measure the first one."""
    for first in batches:
        count = own_loaders.samples(first)
        if count is not None and step.weight == 1.0:  # else a smaller step
            see_samples(count)
        yield first
        break
    yield from batches


def refuse_other_data(context: Context) -> None:
    """Compare the data sets of all ranks with those of rank 0; called by all ranks.

    Each rank takes its part of an order that is computed from the length. If the copy on one host
    lacks some samples, its ranks would read other samples than their share, without an error. If
    ranks have different numbers of data sets, there is no comparison.

    Args:
        context: context of the training.

    Raises:
        UsageError: a rank has different data sets.
    """
    hosts = context.roster.host_names
    sets: Sequence[Any] = context.datasets
    seen = context.backend.gather_object([(len(one), _classes(one)) for one in sets])

    def compare() -> None:
        for rank, theirs in enumerate(seen):
            if len(theirs) != len(seen[0]):
                return
            for local, first in zip(theirs, seen[0], strict=True):
                if local != first:
                    key = "HT611.samples-differ" if local[0] != first[0] else "HT611.classes-differ"
                    nodes = (hosts[rank], hosts[0])
                    raise UsageError(key, local=local, first=first, rank=rank, nodes=nodes)

    on_rank_zero(context.backend, compare)


def _classes(dataset: Any) -> str:
    """Hash the names of the classes, if any, which distinguish data sets of equal length."""
    classes = getattr(dataset, "classes", ())
    named = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return hashlib.sha256(repr(named).encode(errors="surrogateescape")).hexdigest()
