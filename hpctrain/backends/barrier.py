"""Who is there, once the ranks have met: asked of a store that all of them can reach."""

import contextlib
import datetime
from collections.abc import Sequence
from typing import Protocol

from hpctrain.errors import StartError
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.messages import GRACE_SECONDS

__all__ = ["Store", "absent", "assemble", "call", "host_of", "named"]

_ABSENT = "absent"  # the key for a rank that has failed


class Store(Protocol):
    """What is needed of torch.distributed's Store; all raise RuntimeError when it is gone."""

    def set(self, key: str, value: str) -> None:
        """Leave a value under a key."""

    def get(self, key: str) -> bytes:
        """The value of a key, which is waited for."""

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Until all keys are there; RuntimeError when they are not in time."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


def assemble(store: Store, rendezvous: Rendezvous, timeout: float) -> None:
    """Wait until all ranks have come here.

    Before they connect: gloo itself does not say which one it misses. And after that: for a rank
    that is slow, to connect fails as soon as another one leaves.

    Raises:
        StartError: naming those that have not.
    """
    missing = call(store, rendezvous.world.rank, rendezvous.world.world_size, timeout)
    if missing:
        raise StartError(
            f"{named(rendezvous, missing)} came to the rendezvous and {_was(missing)} lost before "
            f"the ranks were connected, within {timeout:.0f} s",
            "all ranks, to the end of the start",
            "look for the first error there, and whether the host can be reached",
        )


def absent(store: Store, rank: int) -> None:
    """Instead of `assemble`, by a rank that has failed: the others need not wait for it."""
    with contextlib.suppress(RuntimeError):  # they are gone
        store.set(_ABSENT, str(rank))
        store.set(str(rank), "")


def call(store: Store, rank: int, size: int, timeout: float) -> list[int]:
    """Which ranks do not call this within a time, the same answer at all that do.

    Args:
        store: with no other keys.
        rank, size: of this process.
        timeout: seconds that rank 0 waits; the others give it a little more to say so.
    """
    said = _missing(store, size, timeout) if rank == 0 else _hear(store, rank, timeout)
    return [int(other) for other in said.split(",") if other]


def _missing(store: Store, size: int, timeout: float) -> str:
    """At rank 0: who is not there in time, with commas; the others are told."""
    others = [str(rank) for rank in range(1, size)]
    try:
        store.wait(others, datetime.timedelta(seconds=timeout))
        missing = store.get(_ABSENT).decode() if store.check([_ABSENT]) else ""
    except RuntimeError:
        missing = ",".join(rank for rank in others if not store.check([rank]))
    store.set("missing", missing)
    if missing:
        # The store ends with this process, so the others have to read it first.
        with contextlib.suppress(RuntimeError):
            there = [f"{rank} knows" for rank in others if rank not in missing.split(",")]
            store.wait(there, datetime.timedelta(seconds=GRACE_SECONDS))
    return missing


def _hear(store: Store, rank: int, timeout: float) -> str:
    """At the others: what rank 0 says is missing; rank 0, where it says nothing."""
    try:
        store.set(str(rank), "")
        store.wait(["missing"], datetime.timedelta(seconds=timeout + GRACE_SECONDS))
        missing = store.get("missing").decode()
        store.set(f"{rank} knows", "")
    except RuntimeError:
        return "0"
    return missing


def host_of(rendezvous: Rendezvous, rank: int) -> str:
    """The name of a rank's host."""
    return rendezvous.roster.hosts[rendezvous.roster.host_of_rank[rank]]


def named(rendezvous: Rendezvous, ranks: Sequence[int]) -> str:
    """`rank 2 on node3, rank 5 on node4`, and no more than eight of them."""
    shown = ", ".join(f"rank {rank} on {host_of(rendezvous, rank)}" for rank in ranks[:8])
    return shown + (", …" if len(ranks) > 8 else "")


def _was(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"
