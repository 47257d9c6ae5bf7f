"""The connections to rank 0: accept ranks, and dismiss unknown peers. No roster here."""

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

# Unknown peers are dismissed after this time, and the oldest of them earlier if their number
# exceeds the number of ranks by more than `_MORE_UNKNOWN`.
_UNKNOWN_SECONDS = 10.0
_MORE_UNKNOWN = 256
# Pause without new connections when the process may open no more files.
_FULL_SECONDS = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class Peer:
    """A connection to rank 0: an unknown peer until it has proved that it is a rank.

    Attributes:
        connection: socket connected to the peer.
        connected_at: time of the connection, by the clock.
        address, own: address of the peer, and address of rank 0 that it connected to.
        challenges: the peer's challenge and rank 0's, once the peer has sent its greeting.
        proved: whether the peer has proved that it belongs to this start.
        confirmed: whether the peer has confirmed the last message.
        received: received bytes that are not yet handled.
        unsent: data that is still to be sent.
    """

    connection: socket.socket
    connected_at: float
    address: str
    own: str
    challenges: tuple[str, str] | None = None
    proved: bool = False
    confirmed: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: list[memoryview] = field(default_factory=list)


class Peers:
    """All connections to rank 0.

    Args:
        listener: non-blocking listening socket; None if no port is free.
        credentials: credentials of this start.
        ranks: number of ranks that may connect.
        arrived: function called with a peer that has given its proof, and with its hello.
        left: function called with a peer that had given its proof and whose connection ended.
        clock: clock in seconds, for every time-out.

    Attributes:
        accept_error: why a connection could not be accepted, or "".
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
        self.accept_error = ""
        self._listener = listener
        self._credentials = credentials
        # Ranks are unknown peers too until they give their proof; all may connect at once.
        self._max_unknown = _MORE_UNKNOWN + ranks
        self._arrived = arrived
        self._left = left
        self._clock = clock
        self._unknown: dict[Peer, None] = {}  # a dict keeps the order of arrival
        self._ranks: dict[Peer, None] = {}
        self._selector = selectors.DefaultSelector()
        self._full_until: float | None = None
        self._listen()

    def watch(
        self, connection: socket.socket, events: int, action: Callable[[int], None] | None
    ) -> None:
        """Call an action with the events when one occurs; None removes the connection."""
        if action is None:
            self._selector.unregister(connection)
        elif connection in self._selector.get_map():
            self._selector.modify(connection, events, action)
        else:
            self._selector.register(connection, events, action)

    @property
    def watches(self) -> bool:
        """Whether any socket is left to wait for."""
        return bool(self._selector.get_map())

    def poll(self, seconds: float) -> None:
        """Handle the connections that are ready; wait for the first at most some seconds."""
        if self._full_until is not None:
            seconds = min(seconds, _FULL_SECONDS)
        for key, events in self._selector.select(max(0.0, seconds)):
            # An earlier action may have closed it.
            if not isinstance(key.fileobj, int) and key.fileobj.fileno() >= 0:
                key.data(events)
        now = self._clock()
        if self._full_until is not None and now > self._full_until:
            self._full_until = None
            self._listen()
        for peer in list(self._unknown):
            new = peer.connected_at > now - _UNKNOWN_SECONDS
            if new and len(self._unknown) <= self._max_unknown:
                break
            self.dismiss(peer)

    def deliver(
        self,
        message: dict[str, Any],
        patience: float,
        wait_for_confirmation: bool = False,
        to: Sequence[Peer] | None = None,
    ) -> None:
        """Send a message to all peers that have given their proof, with a proof for each.

        Args:
            message: message to send.
            patience: seconds to wait for peers that do not receive it.
            wait_for_confirmation: whether to wait until the peers confirm it.
            to: only these peers, if given.
        """
        line = encode(message)
        digest = hashlib.sha256(line).hexdigest()
        peers = list(self._ranks if to is None else to)
        for peer in peers:
            peer.confirmed = False
            proof = self._credentials.proof("message", "".join(peer.challenges or ()), digest)
            self._queue(peer, encode({"proof": proof}), line)
        limit = self._clock() + patience
        while peers and self._clock() < limit:
            last = peers[-1]
            pending = last.unsent or (wait_for_confirmation and not last.confirmed)
            if pending and last.connection.fileno() >= 0:
                self.poll(min(limit - self._clock(), _FULL_SECONDS))
            else:
                peers.pop()  # a finished peer stays finished: no second check

    def dismiss(self, peer: Peer) -> None:
        """Close the connection to a peer."""
        if peer.connection.fileno() < 0:
            return
        self.watch(peer.connection, 0, None)
        peer.connection.close()
        self._unknown.pop(peer, None)
        if peer in self._ranks:
            del self._ranks[peer]
            self._left(peer)

    def close(self) -> None:
        """Close all connections and the listener."""
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
                self.accept_error = f"{error.strerror} (ulimit -n)"
                self._make_room(listener)
            return  # or the peer closed the connection before
        connection.setblocking(False)
        peer = Peer(connection, self._clock(), _plain(address[0]), _plain(own[0]))
        self._unknown[peer] = None
        self.watch(connection, selectors.EVENT_READ, partial(self._serve, peer))

    def _make_room(self, listener: socket.socket) -> None:
        """Dismiss the oldest unknown peer; if there is none, pause new connections."""
        for peer in list(self._unknown)[:1]:
            self.dismiss(peer)
            return
        self.watch(listener, 0, None)
        self._full_until = self._clock() + _FULL_SECONDS

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(peer)
        if events & selectors.EVENT_READ and peer.connection.fileno() >= 0:
            self._receive(peer)

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.received += data
        line, newline, rest = bytes(peer.received).partition(b"\n")
        longest = LONGEST_HELLO if peer.challenges else LONGEST_GREETING
        if newline:
            peer.received = bytearray(rest)
            self._handle(peer, decode(line) or {})
        elif not data or len(peer.received) > longest:
            self.dismiss(peer)

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        """Handle a greeting, a hello, or the confirmation of a message."""
        if peer.proved:
            peer.confirmed = "received" in message
        elif peer.challenges:
            self._accept_rank(peer, message, peer.challenges[1])
        elif message.get("start") == self._credentials.start and "challenge" in message:
            peer.challenges = str(message["challenge"]), Credentials.challenge()
            proof = self._credentials.proof("host", peer.challenges[0])
            answer = {"start": message["start"], "proof": proof, "challenge": peer.challenges[1]}
            self._queue(peer, encode(answer))
        else:
            self.dismiss(peer)

    def _accept_rank(self, peer: Peer, message: dict[str, Any], challenge: str) -> None:
        hello = str(message.get("hello"))
        if not self._credentials.proves(message.get("proof"), "client", challenge, hello):
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
        """Send as much as the connection accepts, and the rest when it accepts more."""
        # Not joined, to avoid copies: a roster goes to thousands of ranks.
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
            part = min(sent, len(peer.unsent[0]))
            peer.unsent[0] = peer.unsent[0][part:]
            sent -= part
            if not peer.unsent[0]:
                del peer.unsent[0]
        more = selectors.EVENT_WRITE if peer.unsent else 0
        self.watch(peer.connection, selectors.EVENT_READ | more, partial(self._serve, peer))


def listen(
    hosts: Sequence[str], candidates: Sequence[int]
) -> tuple[socket.socket | None, list[tuple[str, int]], str]:
    """Open a socket on the first free port, for this host alone if that is enough.

    Args:
        hosts: hosts on which the other ranks look for rank 0.
        candidates: ports to try, in order.

    Returns:
        the socket, or None if no port is free; the places that are in use; and the error of the
        last one.
    """
    error_text = ""
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
            error_text = str(error)
            taken.append((hosts[0] if alone else LOOPBACK, port))
            continue
        server.setblocking(False)
        return server, taken, error_text
    return None, taken, error_text


def _plain(address: str) -> str:
    """Return the IPv4 form of an IPv4 address from an IPv6 socket."""
    return address.removeprefix("::ffff:")
