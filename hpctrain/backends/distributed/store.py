"""The store in which torch's ranks exchange addresses, and a barrier that names missing ranks.

It is torchrun's store, or one on rank 0's socket.
"""

import contextlib
import datetime

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from hpctrain.backends.base import missing_error
from hpctrain.cluster.launchers import base as launching
from hpctrain.cluster.texts import first_line
from hpctrain.errors import RankMissingError
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.messages import GRACE_SECONDS

__all__ = ["AgentStore", "absent", "assemble", "open_store"]

_ABSENT = "absent"  # the key that a failed rank sets


class AgentStore:
    """The TCPStore of torchrun's first agent, for the rendezvous and the process group.

    Source: `_create_c10d_store` in torch/distributed/rendezvous.py, torch 2.15.

    Args:
        place: address and port of the store.
        timeout: seconds to connect to it.

    Raises:
        RankMissingError: the store does not answer.
    """

    def __init__(self, place: launching.LauncherStore, timeout: float) -> None:
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
            reason = first_line(error)
            raise RankMissingError(
                "HT304.store-of-torchrun", store=self.where, limit_s=timeout, reason=reason
            ) from None

    def write(self, name: str, value: bytes) -> None:
        """Publish a value under a name."""
        try:
            self.store.set(f"hpctrain/{name}", value.decode())
        except RuntimeError as error:
            raise OSError(f"{self.where} is gone: {first_line(error)}") from None

    def read(self, name: str) -> bytes | None:
        """Return the value, or None."""
        try:
            key = f"hpctrain/{name}"
            return bytes(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError:
            return None  # the agent is gone; the caller reports it at its time-out

    def clear(self, name: str) -> None:
        """Remove the value, as an agent may start its ranks again."""
        with contextlib.suppress(RuntimeError):  # the agent is gone
            self.store.delete_key(f"hpctrain/{name}")


def open_store(rendezvous: Rendezvous, timeout: datetime.timedelta) -> Store:
    """Return the launcher's own store, else one on the socket that the rendezvous bound.

    That socket is at an address that all ranks have reached.
    """
    world, roster, listener = rendezvous.world, rendezvous.roster, rendezvous.listener
    if isinstance(rendezvous.store, AgentStore):
        if listener is not None:
            listener.close()
        return rendezvous.store.store
    try:
        return TCPStore(
            roster.addresses[0],
            roster.port,
            world.world_size,
            is_master=world.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except (RuntimeError, ValueError):  # torch's message has an address that does not help
        node, limit_s = roster.host(world.rank), timeout.total_seconds()
        raise RankMissingError(
            "HT304.store-of-rank-0", rendezvous=rendezvous, node=node, limit_s=limit_s
        ) from None


def assemble(store: Store, rendezvous: Rendezvous, timeout: float) -> None:
    """Wait until all ranks have called this; all that do get the same answer.

    Used before the ranks connect, as gloo does not report which rank is missing. Also used after
    that: the connection of a slow rank fails if another rank leaves earlier.

    Args:
        store: store without other keys.
        rendezvous: all ranks, with their hosts.
        timeout: seconds that rank 0 waits; the other ranks wait a little longer for its answer.

    Raises:
        RankMissingError: names the missing ranks.
    """
    rank, size = rendezvous.world.rank, rendezvous.world.world_size
    missing = _receive_missing(store, rank, timeout) if rank else _missing(store, size, timeout)
    if missing:
        raise missing_error(rendezvous, [int(other) for other in missing.split(",")], timeout)


def absent(store: Store, rank: int) -> None:
    """Report that this rank has failed, in place of `assemble`, so that no rank waits for it."""
    with contextlib.suppress(RuntimeError):  # the other ranks are gone
        store.set(_ABSENT, str(rank))
        store.set(str(rank), "")


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
