"""The store in which torch's ranks exchange addresses: torchrun's, or one on rank 0's socket."""

import contextlib
import datetime

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from hpctrain.backends.barrier import host_of
from hpctrain.cluster.launchers import base as launching
from hpctrain.errors import RankMissingError
from hpctrain.rendezvous import Rendezvous

__all__ = ["AgentStore", "first_line", "open_store"]


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
            raise RankMissingError(
                "HT304",
                f"{self.where} does not answer within {timeout:.0f} s: {first_line(error)}",
                "torchrun's first agent there",
                "look for the first error of the torchrun on that host",
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
            use_libuv=False,  # libuv takes a bound socket only from torch 2.8 on
        )
    except (RuntimeError, ValueError):  # torch's message has an address that does not help
        raise RankMissingError(
            "HT304",
            f"rank {world.rank} on {host_of(rendezvous, world.rank)} cannot open the store of "
            f"rank 0 at {roster.addresses[0]} port {roster.port}, on {host_of(rendezvous, 0)}, "
            f"within {timeout.total_seconds():.0f} s",
            "the address that was used for the rendezvous",
            "look for the first error in the log of rank 0, and whether its host can be reached",
        ) from None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
