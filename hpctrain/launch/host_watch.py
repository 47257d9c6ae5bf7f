"""Connections between the agents of a start, which show in ten seconds when a host is lost.

Slurm waits `SlurmdTimeout` (300 s by default) before it says that a host is down, and NCCL or gloo
wait for their own time-out. So each agent keeps a connection to the first one, on which TCP's
keep-alive asks the other kernel every two seconds. A suspended or busy process is not a lost host:
its kernel answers.

    agent → first agent   NONCE INDEX     the first line: who connects
    first agent → agent   lost INDEX      a host is lost
    both                  bye             the ranks of this host have ended

Without `bye`, the end of a connection is a lost host, too: its agent is gone, and so are its ranks.
"""

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable

from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.messages import keep_alive

__all__ = ["SECONDS_TO_DETECT", "HostWatch"]

SECONDS_TO_DETECT = 10
_SECONDS_TO_CONNECT = 10
_INTERVAL = 2
# When a whole start is ended, the agents end one after the other.
_SECONDS_TO_EXPLAIN = 1.5
_LONGEST_LINE = 1 << 10
_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class HostWatch:
    """This agent's part in the search for lost hosts; without a thread, as the agent forks.

    Args:
        met: rendezvous of the agents, each of which counts as one rank. Its listener is closed at
            the end.
        on_loss: function to call once, when a host is lost.

    Attributes:
        lost: name of a lost host; empty if there is none.
    """

    def __init__(self, met: Rendezvous, on_loss: Callable[[], None]) -> None:
        self.lost = ""
        self._met, self._on_loss = met, on_loss
        # When connections ended without `bye`, or those end that are not yet there.
        self._ended: dict[int, float] = {}
        self._peers: dict[socket.socket, int] = {}  # -1 as long as it has not said who it is
        self._rests: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        if met.listener is not None:
            met.listener.setblocking(False)
            self._selector.register(met.listener, selectors.EVENT_READ)
            # The host of an agent that has waited may have been lost meanwhile.
            others = range(1, met.world.world_size)
            self._ended = dict.fromkeys(others, time.monotonic() + _SECONDS_TO_CONNECT)
        else:
            self._connect()

    def look(self) -> None:
        """Handle what has happened on the connections; to be called often."""
        if self.lost:
            return
        while not self.lost and (ready := self._selector.select(0)):
            for key, _ in ready:
                if key.fileobj is self._met.listener:
                    with contextlib.suppress(OSError):
                        self._add(self._met.listener.accept()[0], -1)
                elif key.fileobj in self._peers:
                    self._read(key.fileobj)
        for index, since in self._ended.items():
            if time.monotonic() > since + _SECONDS_TO_EXPLAIN:
                self._lose(index)
                return

    def close(self) -> None:
        """Tell the others that the ranks of this host have ended, and close the connections."""
        self.look()
        while self._ended and not self.lost:
            time.sleep(_SECONDS_TO_EXPLAIN / 10)
            self.look()
        for peer in self._peers:
            _send(peer, "bye")
            peer.close()
        if self._met.listener is not None:
            self._met.listener.close()
        self._selector.close()

    def _connect(self) -> None:
        roster = self._met.roster
        try:
            peer = socket.create_connection((roster.addresses[0], roster.port), _SECONDS_TO_CONNECT)
        except OSError:
            self._ended[0] = time.monotonic()
            return
        self._add(peer, 0)
        _send(peer, f"{self._met.nonce} {self._met.world.rank}")

    def _add(self, peer: socket.socket, index: int) -> None:
        keep_alive(peer, SECONDS_TO_DETECT, _INTERVAL)
        peer.setblocking(False)
        self._peers[peer], self._rests[peer] = index, b""
        self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        index = self._peers[peer]
        try:
            data = peer.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError as error:
            data = b""
            if index >= 0 and error.errno in _LOST:
                self._lose(index)
        *lines, self._rests[peer] = (self._rests[peer] + data).split(b"\n")
        for line in lines:
            self._handle(peer, line.decode(errors="replace").split())
        if peer in self._peers and (not data or len(self._rests[peer]) > _LONGEST_LINE):
            self._drop(peer)
            if index >= 0:
                self._ended[index] = time.monotonic()

    def _handle(self, peer: socket.socket, words: list[str]) -> None:
        index, hosts = self._peers.get(peer), len(self._met.roster.hosts)
        match words:
            case [nonce, number] if index == -1 and nonce == self._met.nonce:
                self._peers[peer] = int(number) if number.isdecimal() else -1
                self._ended.pop(self._peers[peer], None)
            case ["lost", number] if index == 0 and number.isdecimal() and int(number) < hosts:
                self._lose(int(number))
            case ["bye"] if index is not None and index >= 0:
                self._drop(peer)
            case _:
                self._drop(peer)  # an unknown program

    def _drop(self, peer: socket.socket) -> None:
        if self._peers.pop(peer, None) is not None:
            self._selector.unregister(peer)
            peer.close()

    def _lose(self, index: int) -> None:
        if self.lost:
            return
        self.lost = self._met.roster.hosts[index]
        if self._met.listener is not None:
            for peer in self._peers:
                _send(peer, f"lost {index}")
        self._on_loss()


def _send(peer: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # its end is noticed by a read
        peer.sendall(f"{line}\n".encode())
