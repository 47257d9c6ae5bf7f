"""An epoch of a loader: how long it is, and how to begin it where a run stands."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from hpctrain.data.feed import Placement, feed
from hpctrain.data.loader import Loader
from hpctrain.data.sampler import TrainingSampler
from hpctrain.errors import UsageError
from hpctrain.process import signals
from hpctrain.process.logging import logger

__all__ = ["begin_epoch", "steps_of_epoch"]


def steps_of_epoch(loader: Iterable[Any], accumulate: int) -> int | None:
    """How many optimizer steps an epoch has, where the loader knows.

    Args:
        loader: of `session.loader()`, or any iterable of batches.
        accumulate: micro-batches of a step on one rank.

    Raises:
        UsageError: an epoch has no step.
    """
    sampler = loader.sampler if isinstance(loader, Loader) else None
    if isinstance(sampler, TrainingSampler):
        return sampler.steps
    if not isinstance(loader, Sized):
        return None
    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader asks its data set, which may have none
        return None
    if batches < accumulate:
        raise UsageError(
            f"a loader of {batches} batches, and a step takes {accumulate} micro-batches",
            "at least one step in each epoch",
            f"--accumulate {batches}, or smaller batches" if batches else "a loader with samples",
        )
    return batches // accumulate


def begin_epoch(
    loader: Iterable[Any],
    samplers: Sequence[TrainingSampler],
    placement: Placement,
    epoch: int,
    first: int,
) -> Iterator[Any]:
    """The micro-batches of an epoch from one of them on.

    Args:
        loader: of `session.loader()`; or any iterable, whose batches are placed here.
        samplers: those of all training loaders, also of those that the script has wrapped.
        placement: where batches go.
        epoch: its number, from 0.
        first: micro-batches of this rank to leave out.
    """
    for sampler in samplers:
        sampler.epoch, sampler.first = epoch, 0
    if isinstance(loader, Loader) and isinstance(loader.sampler, TrainingSampler):
        loader.sampler.first = first
        return iter(loader)
    with signals.blocked():
        iterator = feed(iter(loader), placement)
    if first:
        logger.warning("this loader cannot skip: %d batches are fetched and dropped", first)
        for _ in range(first):
            next(iterator, None)
    return iterator
