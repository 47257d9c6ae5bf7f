"""Stores that programs without hpctrain expect from their launcher.

The ranks of torchrun find each other in the TCPStore of its first agent, those of horovodrun in its
key-value store over HTTP. The first host of a start offers both. Their servers start only when a
first client connects, see `store_starter`.
"""

import os
import select
import subprocess
import sys
from collections.abc import Mapping

from hpctrain.launch import store_starter
from hpctrain.rendezvous.addresses import LOOPBACK, open_listener

__all__ = ["Stores"]

_SERVERS = ("hpctrain.backends.distributed.store_process", "hpctrain.rendezvous.http_store")


class Stores:
    """Sockets of the two stores, bound to free ports.

    Args:
        local: whether all ranks are on this host. The sockets then have only its loopback address,
            else all its addresses.

    Attributes:
        ports: port of the TCPStore and of Horovod's store.
    """

    def __init__(self, local: bool) -> None:
        self._sockets = [open_listener(LOOPBACK if local else None, 0) for _ in _SERVERS]
        self.ports = [listener.getsockname()[1] for listener in self._sockets]
        self._process: subprocess.Popen[bytes] | None = None
        self._told, self._tells = os.pipe()

    @property
    def used(self) -> bool:
        """Whether a client has connected to one of the stores."""
        return bool(select.select([self._told], [], [], 0)[0])

    def serve(self, env: Mapping[str, str]) -> None:
        """Start the process that serves the stores while this process runs.

        Args:
            env: environment of that process.
        """
        words = [str(os.getpid())]
        for listener, module in zip(self._sockets, _SERVERS, strict=True):
            words += [str(listener.fileno()), module]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", store_starter.__file__, *words],
            # torch warns of clients without a reverse name.
            env={**env, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            stdout=self._tells,
            pass_fds=[listener.fileno() for listener in self._sockets],
            start_new_session=True,
        )
        self._close_sockets()

    def close(self) -> None:
        """End the servers."""
        self._close_sockets()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        os.close(self._told)
        os.close(self._tells)

    def _close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()
