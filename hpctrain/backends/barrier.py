"""A barrier after the rendezvous that names missing ranks, over a store that all can reach."""

import contextlib
import datetime
from collections.abc import Sequence
from typing import Protocol

from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import RankMissingError
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.messages import GRACE_SECONDS

__all__ = ["Store", "absent", "assemble", "call", "host_of", "missing_error", "named"]

_ABSENT = "absent"  # the key that a failed rank sets


class Store(Protocol):
    """The part of torch.distributed's Store that is used here.

    All methods raise RuntimeError when the store is gone.
    """

    def set(self, key: str, value: str) -> None:
        """Store a value under a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it exists."""

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Wait until all keys exist; raise RuntimeError if they do not exist in time."""

    def check(self, keys: list[str]) -> bool:
        """Check whether all keys exist."""


def assemble(store: Store, rendezvous: Rendezvous, timeout: float) -> None:
    """Wait until all ranks have called this.

    Used before the ranks connect, as gloo does not report which rank is missing. Also used after
    that: the connection of a slow rank fails if another rank leaves earlier.

    Raises:
        RankMissingError: names the missing ranks.
    """
    missing = call(store, rendezvous.world.rank, rendezvous.world.world_size, timeout)
    if missing:
        raise missing_error(rendezvous, missing, timeout)


def missing_error(
    rendezvous: Rendezvous, missing: Sequence[int], timeout: float
) -> RankMissingError:
    """Return the error that names the ranks that were lost after the rendezvous."""
    return RankMissingError(
        "HT305",
        f"{named(rendezvous, missing)} took part in the rendezvous and {_was(missing)} lost "
        f"before the ranks were connected, within {timeout:.0f} s",
        "all ranks until the start is complete",
        "look for the first error there, and whether the host can be reached",
    )


def absent(store: Store, rank: int) -> None:
    """Report that this rank has failed, in place of `assemble`, so that no rank waits for it."""
    with contextlib.suppress(RuntimeError):  # the other ranks are gone
        store.set(_ABSENT, str(rank))
        store.set(str(rank), "")


def call(store: Store, rank: int, size: int, timeout: float) -> list[int]:
    """Return the ranks that do not call this in time; all ranks that do get the same answer.

    Args:
        store: store without other keys.
        rank, size: rank of this process, and number of ranks.
        timeout: seconds that rank 0 waits; the other ranks wait a little longer for its answer.
    """
    missing = (
        _missing(store, size, timeout) if rank == 0 else _receive_missing(store, rank, timeout)
    )
    return [int(other) for other in missing.split(",") if other]


def _missing(store: Store, size: int, timeout: float) -> str:
    """Return the missing ranks, separated by commas, and publish them; called on rank 0."""
    keys = [str(rank) for rank in range(1, size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
        missing = store.get(_ABSENT).decode() if store.check([_ABSENT]) else ""
    except RuntimeError:
        missing = ",".join(rank for rank in keys if not store.check([rank]))
    store.set("missing", missing)
    if missing:
        # The store ends with this process, so the other ranks have to read it first.
        with contextlib.suppress(RuntimeError):
            received = [f"{rank} received" for rank in keys if rank not in missing.split(",")]
            store.wait(received, datetime.timedelta(seconds=GRACE_SECONDS))
    return missing


def _receive_missing(store: Store, rank: int, timeout: float) -> str:
    """Return the missing ranks that rank 0 published, or "0" if it does not answer."""
    try:
        store.set(str(rank), "")
        store.wait(["missing"], datetime.timedelta(seconds=timeout + GRACE_SECONDS))
        missing = store.get("missing").decode()
        store.set(f"{rank} received", "")
    except RuntimeError:
        return "0"
    return missing


def host_of(rendezvous: Rendezvous, rank: int) -> str:
    """Return the name of a rank's host."""
    return rendezvous.roster.host(rank)


def named(rendezvous: Rendezvous, ranks: Sequence[int]) -> str:
    """Format ranks as `ranks 2 and 5 on node3 and node4`."""
    return ranks_text(ranks, {rank: host_of(rendezvous, rank) for rank in ranks})


def _was(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"
