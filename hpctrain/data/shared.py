"""Loaders of a script as the ranks share them."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpctrain.data.shared_loader import SharedLoader
from hpctrain.data.shared_order import Shared, Sharing
from hpctrain.data.shared_stream import SharedStream

__all__ = ["share"]

_SHARED = "_hpctrain_shared"


def share(source: Iterable[Any], sharing: Sharing, split: bool) -> Shared:
    """Return a loader of the script as the ranks share it; the same one for the same DataLoader.

    Args:
        source: any iterable of batches, or what this function returned.
        sharing: how the ranks share the batches.
        split: whether the batch size of a DataLoader is that of all ranks.
    """
    if isinstance(source, Shared):
        return source
    if not isinstance(source, DataLoader):
        return SharedStream(source, sharing, split)
    shared: Shared | None = vars(source).get(_SHARED)
    if shared is None or shared.events is not sharing.events:  # of another session
        kind = SharedStream if isinstance(source.dataset, IterableDataset) else SharedLoader
        shared = vars(source)[_SHARED] = kind(source, sharing, split)
    return shared
