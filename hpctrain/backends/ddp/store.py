"""The store over which torch's ranks exchange addresses: torchrun's, or one on rank 0's socket."""

import contextlib
import datetime

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from hpctrain.errors import StartError
from hpctrain.launchers import base as launching
from hpctrain.meeting import Meeting
from hpctrain.meeting.messages import GRACE_SECONDS

__all__ = ["AgentStore", "assemble", "first_line", "host_of", "open_store"]


class AgentStore:
    """The TCPStore that torchrun's first agent serves: a board, and the process group's store.

    Source: `_create_c10d_store` in torch/distributed/rendezvous.py, torch 2.15.

    Args:
        place: where the agent serves it.
        timeout: seconds to find it.

    Raises:
        StartError: it does not answer.
    """

    def __init__(self, place: launching.Store, timeout: float) -> None:
        self.where = f"torchrun's store at {place.address} port {place.port}"
        try:
            self.store = TCPStore(
                place.address,
                place.port,
                is_master=False,
                timeout=datetime.timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            raise StartError(
                f"{self.where} does not answer within {timeout:.0f} s: {first_line(error)}",
                "torchrun's first agent there",
                "look for the first error of the torchrun on that host",
            ) from None

    def write(self, name: str, word: bytes) -> None:
        """Leave a word."""
        try:
            self.store.set(f"hpctrain/{name}", word.decode())
        except RuntimeError as error:
            raise OSError(f"{self.where} is gone: {first_line(error)}") from None

    def read(self, name: str) -> bytes | None:
        """The word, or None."""
        try:
            key = f"hpctrain/{name}"
            return bytes(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError:
            return None  # the agent is gone; who waits for the word says so in the end

    def clear(self, name: str) -> None:
        """Take the word away: an agent may start its ranks again."""
        with contextlib.suppress(RuntimeError):  # the agent is gone
            self.store.delete_key(f"hpctrain/{name}")


def open_store(meeting: Meeting, timeout: datetime.timedelta) -> Store:
    """The launcher's own store, else one on the socket that the meeting bound.

    That is at an address which all ranks have reached.
    """
    world, roll = meeting.world, meeting.roll
    if isinstance(meeting.store, AgentStore):
        return meeting.store.store
    listener = meeting.listener
    try:
        return TCPStore(
            roll.addresses[0],
            roll.port,
            world.world_size,
            is_master=world.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
            use_libuv=False,  # which takes a bound socket only from torch 2.8 on
        )
    except (RuntimeError, ValueError):  # whose message has an address that nobody asked for
        raise StartError(
            f"rank {world.rank} on {host_of(meeting, world.rank)} cannot open the store of rank 0 "
            f"at {roll.addresses[0]} port {roll.port}, on {host_of(meeting, 0)}, within "
            f"{timeout.total_seconds():.0f} s",
            "the way that it met the others by",
            "look for the first error in the log of rank 0, and whether its host can be reached",
        ) from None


def assemble(store: Store, meeting: Meeting, timeout: float) -> None:
    """Wait until all ranks have opened the store: gloo itself does not say which one it misses.

    Raises:
        StartError: naming those that have not.
    """
    rank, size = meeting.world.rank, meeting.world.world_size
    missing = _missing(store, size, timeout) if rank == 0 else _hear(store, rank, timeout)
    if missing:
        gone = [f"rank {other} on {host_of(meeting, int(other))}" for other in missing.split(",")]
        raise StartError(
            f"{', '.join(gone[:8])}{', …' if len(gone) > 8 else ''} came to the meeting and was "
            f"lost before the ranks were connected, within {timeout:.0f} s",
            "all ranks, to the end of the start",
            "look for the first error there, and whether the host can be reached",
        )


def _missing(store: Store, size: int, timeout: float) -> str:
    """At rank 0: who is not there in time, with commas; the others are told."""
    others = [str(rank) for rank in range(1, size)]
    try:
        store.wait(others, datetime.timedelta(seconds=timeout))
        missing = ""
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


def host_of(meeting: Meeting, rank: int) -> str:
    """The name of a rank's host."""
    return meeting.roll.hosts[meeting.roll.host_of_rank[rank]]


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
