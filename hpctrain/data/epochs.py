"""Epochs of a loader: their length, and their start at the position of a run."""

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
    """Return the number of optimizer steps of an epoch; None if the loader has no length.

    Args:
        loader: loader of `session.loader()`, or any iterable of batches.
        accumulate: micro-batches per step on one rank.

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
    except (TypeError, NotImplementedError):  # the data set of a DataLoader may have no length
        return None
    if batches < accumulate:
        raise UsageError(
            "HT506",
            f"a loader of {batches} batches, but a step takes {accumulate} micro-batches",
            "at least one step in each epoch",
            f"--accumulate {batches}" if batches else "a loader with samples",
            "smaller batches" if batches else "",
        )
    return batches // accumulate


def begin_epoch(
    loader: Iterable[Any],
    samplers: Sequence[TrainingSampler],
    placement: Placement,
    epoch: int,
    first: int,
) -> Iterator[Any]:
    """Return an iterator over the micro-batches of an epoch, from a given one on.

    Args:
        loader: loader of `session.loader()`, or any iterable, whose batches are moved here.
        samplers: samplers of all training loaders, including loaders that the script has wrapped.
        placement: device and format of the batches.
        epoch: number of the epoch, from 0.
        first: number of micro-batches of this rank to skip.
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
