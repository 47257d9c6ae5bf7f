"""Stores that programs without hpctrain expect from their launcher.

The ranks of torchrun find each other in the TCPStore of its first agent, those of horovodrun in its
key-value store over HTTP. The first host of a start offers both. Their servers start only when a
first client connects, see `fork_server`.
"""

import os
import select
import socket

from hpctrain.cluster import system
from hpctrain.rendezvous.addresses import LOOPBACK, open_listener

__all__ = ["Stores"]

_SERVERS = ("hpctrain.backends.distributed.store_process", "hpctrain.rendezvous.http_store")


class Stores:
    """Sockets of the two stores, bound to free ports.

    Args:
        local: whether all ranks are on this host. The sockets then have only its loopback address,
            else all its addresses.

    Attributes:
        ports: port of the TCPStore and of Horovod's store, and a free port for a TCPStore that
            rank 0 serves itself.
        servers: file descriptor of each socket, and the module of its server.
        tells: file descriptor to which the fork server writes a line when it starts a server.
    """

    def __init__(self, local: bool) -> None:
        self._sockets = [open_listener(LOOPBACK if local else None, 0) for _ in _SERVERS]
        self._free = _reserved_port(LOOPBACK if local else "")
        self.ports = [one.getsockname()[1] for one in (*self._sockets, self._free)]
        if not system.COMPLETE:  # macOS gives a port to one socket only
            self._free.close()
        descriptors = [listener.fileno() for listener in self._sockets]
        self.servers = tuple(zip(descriptors, _SERVERS, strict=True))
        self._told, self.tells = os.pipe()

    @property
    def used(self) -> bool:
        """Whether a client has connected to one of the stores."""
        return bool(select.select([self._told], [], [], 0)[0])

    def hand_over(self) -> None:
        """Leave the sockets to the fork server, so that they close when it ends."""
        for listener in self._sockets:
            listener.close()

    def close(self) -> None:
        """Close the sockets, after the end of the fork server."""
        self.hand_over()
        self._free.close()
        os.close(self._told)
        os.close(self.tells)


def _reserved_port(address: str) -> socket.socket:
    """Return a socket with a free port, which another process may bind, too, but gets by no chance.

    Linux lets several sockets with SO_REUSEADDR have a port while none of them listens: socket(7).
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved
