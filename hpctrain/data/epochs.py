"""Epochs of a loader: their length, and their start at the position of a run."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpctrain.data.feed import Placement, feed
from hpctrain.data.loader import Loader
from hpctrain.data.own_loaders import without_bar
from hpctrain.data.sampler import TrainingSampler
from hpctrain.data.shared_loader import SharedLoader
from hpctrain.data.shared_order import Sharing
from hpctrain.data.shared_stream import SharedStream

__all__ = ["SHARED", "begin_epoch", "counts_itself", "share", "steps_of_epoch"]


SHARED = (SharedLoader, SharedStream)


def counts_itself(loader: Iterable[Any]) -> bool:
    """Return whether a loader can begin at any batch, and has only those of this rank.

    Args:
        loader: loader of `session.loader()`, a range, or any iterable of batches.
    """
    return isinstance(loader, range) or (
        isinstance(loader, Loader) and isinstance(loader.sampler, TrainingSampler)
    )


def steps_of_epoch(loader: Any, accumulate: int) -> int:
    """Return the number of optimizer steps of an epoch.

    Args:
        loader: training loader of `session.loader()`, or a range.
        accumulate: micro-batches per step on one rank.
    """
    steps: int = len(loader) // accumulate if isinstance(loader, range) else loader.sampler.steps
    return steps


def share(source: Iterable[Any], sharing: Sharing, split: bool) -> SharedLoader | SharedStream:
    """Return a loader of the script as the ranks share it; the same one for the same DataLoader.

    Args:
        source: any iterable of batches, or what this function returned.
        sharing: how the ranks share the batches.
        split: whether the batch size of a DataLoader is that of all ranks.
    """
    if isinstance(source, SHARED):
        return source
    if not isinstance(source, DataLoader):
        return SharedStream(source, sharing, split)
    shared: SharedLoader | SharedStream | None = vars(source).get(_SHARED)
    if shared is None or shared.events is not sharing.events:  # of another session
        kind = SharedStream if isinstance(source.dataset, IterableDataset) else SharedLoader
        shared = vars(source)[_SHARED] = kind(source, sharing, split)
    return shared


_SHARED = "_hpctrain_shared"


def begin_epoch(loader: Iterable[Any], placement: Placement, first: int) -> Iterator[Any]:
    """Return an iterator over the micro-batches of an epoch, from a given one on.

    Args:
        loader: loader of `session.loader()`, a range, or a shared loader that has begun the epoch;
            each may be in a tqdm bar.
        placement: device and format of the batches.
        first: number of micro-batches of this rank to skip.
    """
    inner = without_bar(loader)
    if isinstance(inner, range):
        return iter(inner[first:])
    if not counts_itself(inner):
        return feed(iter(loader), placement)
    inner.sampler.first = first
    return iter(loader)
