"""Who calls rank 0: it listens, lets ranks in and sends strangers away. It knows of no roster."""

import errno
import hashlib
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.rendezvous.addresses import LOOPBACK
from hpctrain.rendezvous.messages import (
    LONGEST_GREETING,
    LONGEST_HELLO,
    Clock,
    Credentials,
    decode,
    encode,
    keep_alive,
)

__all__ = ["Peer", "Peers", "listen"]

# Strangers who say nothing are sent away after this, and the oldest of them when there are more
# than there can be ranks.
_STRANGER_SECONDS = 10.0
_STRANGERS = 256
# Nobody is let in for this long where the process may open no more files.
_FULL_SECONDS = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class Peer:
    """A connection to rank 0: a rank, or a stranger until it has proved that it is one.

    Attributes:
        connection: to it.
        came: when, by the clock.
        address, own: its address, and the one that it called.
        challenges: its own and rank 0's, from the moment that it greeted.
        proved: that it belongs to this start.
        has_heard: it said that it has the last message.
    """

    connection: socket.socket
    came: float
    address: str
    own: str
    challenges: tuple[str, str] | None = None
    proved: bool = False
    has_heard: bool = False
    heard: bytearray = field(default_factory=bytearray)
    unsent: list[memoryview] = field(default_factory=list)


class Peers:
    """All connections to rank 0.

    Args:
        listener: non-blocking; None where nobody can call.
        credentials: of the start.
        ranks: how many may come.
        arrived: called with a caller that has proved itself and its word.
        left: called with a caller of those that is gone.
        clock: for every time-out.

    Attributes:
        trouble: why somebody could not be let in, or "".
    """

    def __init__(
        self,
        listener: socket.socket | None,
        credentials: Credentials,
        ranks: int,
        arrived: Callable[[Peer, str], None],
        left: Callable[[Peer], None],
        clock: Clock,
    ) -> None:
        self.trouble = ""
        self._listener = listener
        self._credentials = credentials
        # Ranks are strangers too, until they have said who they are; all of them may call at once.
        self._most_strangers = _STRANGERS + ranks
        self._arrived = arrived
        self._left = left
        self._clock = clock
        self._unknown: dict[Peer, None] = {}  # a dict keeps the order in which they came
        self._ranks: dict[Peer, None] = {}
        self._selector = selectors.DefaultSelector()
        self._full_until: float | None = None
        self._listen()

    def watch(
        self, connection: socket.socket, events: int, action: Callable[[int], None] | None
    ) -> None:
        """Call an action with the events when one of them comes; None to forget a connection."""
        if action is None:
            self._selector.unregister(connection)
        elif connection in self._selector.get_map():
            self._selector.modify(connection, events, action)
        else:
            self._selector.register(connection, events, action)

    @property
    def watches(self) -> bool:
        """Whether there is anybody left to hear."""
        return bool(self._selector.get_map())

    def attend(self, seconds: float) -> None:
        """Go on with whoever has something to say or to hear, within some seconds."""
        if self._full_until is not None:
            seconds = min(seconds, _FULL_SECONDS)
        for key, events in self._selector.select(max(0.0, seconds)):
            # An action before may have closed it.
            if not isinstance(key.fileobj, int) and key.fileobj.fileno() >= 0:
                key.data(events)
        now = self._clock()
        if self._full_until is not None and now > self._full_until:
            self._full_until = None
            self._listen()
        for stranger in list(self._unknown):
            new = stranger.came > now - _STRANGER_SECONDS
            if new and len(self._unknown) <= self._most_strangers:
                break
            self.dismiss(stranger)

    def deliver(
        self,
        message: dict[str, Any],
        patience: float,
        heard: bool = False,
        to: Sequence[Peer] | None = None,
    ) -> None:
        """Send a message to all that have proved themselves, and vouch for it to each.

        Args:
            message: to send.
            patience: seconds until it is given up for those who do not take it.
            heard: wait until they say that they have it.
            to: these alone.
        """
        line = encode(message)
        digest = hashlib.sha256(line).hexdigest()
        peers = list(self._ranks if to is None else to)
        for peer in peers:
            peer.has_heard = False
            proof = self._credentials.proof("message", "".join(peer.challenges or ()), digest)
            self._queue(peer, encode({"proof": proof}), line)
        limit = self._clock() + patience
        while peers and self._clock() < limit:
            last = peers[-1]
            owes = last.unsent or (heard and not last.has_heard)
            if owes and last.connection.fileno() >= 0:
                self.attend(min(limit - self._clock(), _FULL_SECONDS))
            else:
                peers.pop()  # who is done stays done: nobody is looked at again

    def dismiss(self, peer: Peer) -> None:
        """Close a connection."""
        if peer.connection.fileno() < 0:
            return
        self.watch(peer.connection, 0, None)
        peer.connection.close()
        self._unknown.pop(peer, None)
        if peer in self._ranks:
            del self._ranks[peer]
            self._left(peer)

    def close(self) -> None:
        """Close everything, the listener too."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _listen(self) -> None:
        if self._listener is not None:
            accept = partial(self._accept, self._listener)
            self.watch(self._listener, selectors.EVENT_READ, accept)

    def _accept(self, listener: socket.socket, _events: int) -> None:
        try:
            connection, address = listener.accept()
            own = connection.getsockname()
        except OSError as error:
            if error.errno in _FULL:
                self.trouble = f"{error.strerror} (ulimit -n)"
                self._make_room(listener)
            return  # or it left before it was let in
        connection.setblocking(False)
        peer = Peer(connection, self._clock(), _plain(address[0]), _plain(own[0]))
        self._unknown[peer] = None
        self.watch(connection, selectors.EVENT_READ, partial(self._serve, peer))

    def _make_room(self, listener: socket.socket) -> None:
        """For a rank, at a stranger's cost; else nobody is let in for a moment."""
        for stranger in list(self._unknown)[:1]:
            self.dismiss(stranger)
            return
        self.watch(listener, 0, None)
        self._full_until = self._clock() + _FULL_SECONDS

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(peer)
        if events & selectors.EVENT_READ and peer.connection.fileno() >= 0:
            self._hear(peer)

    def _hear(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.heard += data
        line, newline, rest = bytes(peer.heard).partition(b"\n")
        longest = LONGEST_HELLO if peer.challenges else LONGEST_GREETING
        if newline:
            peer.heard = bytearray(rest)
            self._understand(peer, decode(line) or {})
        elif not data or len(peer.heard) > longest:
            self.dismiss(peer)

    def _understand(self, peer: Peer, said: dict[str, Any]) -> None:
        """A greeting, a hello, or that a message was heard."""
        if peer.proved:
            peer.has_heard = "heard" in said
        elif peer.challenges:
            self._let_in(peer, said, peer.challenges[1])
        elif said.get("start") == self._credentials.start and "challenge" in said:
            peer.challenges = str(said["challenge"]), Credentials.challenge()
            proof = self._credentials.proof("host", peer.challenges[0])
            answer = {"start": said["start"], "proof": proof, "challenge": peer.challenges[1]}
            self._queue(peer, encode(answer))
        else:
            self.dismiss(peer)

    def _let_in(self, peer: Peer, said: dict[str, Any], challenge: str) -> None:
        hello = str(said.get("hello"))
        if not self._credentials.proves(said.get("proof"), "client", challenge, hello):
            self.dismiss(peer)
            return
        try:
            keep_alive(peer.connection)
        except OSError:
            self.dismiss(peer)
            return
        del self._unknown[peer]
        self._ranks[peer] = None
        peer.proved = True
        self._arrived(peer, hello)

    def _queue(self, peer: Peer, *lines: bytes) -> None:
        """Send as much as the connection takes, and the rest when it takes more."""
        # Not joined: a roster goes to thousands.
        peer.unsent += map(memoryview, lines)
        self._send(peer)

    def _send(self, peer: Peer) -> None:
        try:
            sent = peer.connection.sendmsg(peer.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.dismiss(peer)
            return
        while sent:
            gone = min(sent, len(peer.unsent[0]))
            peer.unsent[0] = peer.unsent[0][gone:]
            sent -= gone
            if not peer.unsent[0]:
                del peer.unsent[0]
        more = selectors.EVENT_WRITE if peer.unsent else 0
        self.watch(peer.connection, selectors.EVENT_READ | more, partial(self._serve, peer))


def listen(
    hosts: Sequence[str], candidates: Sequence[int]
) -> tuple[socket.socket | None, list[tuple[str, int]], str]:
    """A socket on the first free port, for this host alone where that is enough.

    Args:
        hosts: where the others look for rank 0.
        candidates: ports.

    Returns:
        the socket, or None where no port is free; the places that are taken; and why the last one
        is.
    """
    why = ""
    alone = len(hosts) == 1 and is_loopback(hosts[0])
    taken = []
    for port in candidates:
        try:
            if alone:
                family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
                server = socket.create_server((hosts[0], port), family=family, backlog=4096)
            elif socket.has_dualstack_ipv6():
                server = socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
                )
            else:
                server = socket.create_server(("", port), backlog=4096)
        except OSError as error:
            why = str(error)
            taken.append((hosts[0] if alone else LOOPBACK, port))
            continue
        server.setblocking(False)
        return server, taken, why
    return None, taken, why


def _plain(address: str) -> str:
    """An IPv4 address that came over an IPv6 socket, as IPv4."""
    return address.removeprefix("::ffff:")
