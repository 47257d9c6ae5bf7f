"""Who calls rank 0: it listens, lets ranks in and sends strangers away. It knows of no roll."""

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

__all__ = ["Caller", "Callers", "listen"]

# Strangers who say nothing are sent away after this, and the oldest of them when there are more
# than there can be ranks.
_STRANGER_SECONDS = 10.0
_STRANGERS = 256
# Nobody is let in for this long where the process may open no more files.
_FULL_SECONDS = 0.1
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class Caller:
    """A connection to rank 0: a rank, or a stranger until it has proved that it is one.

    Attributes:
        connection: to it.
        came: when, by the clock.
        peer, own: its address, and the one that it called.
        challenges: its own and rank 0's, from the moment that it greeted.
        proved: that it belongs to this start.
        has_heard: it said that it has the last message.
    """

    connection: socket.socket
    came: float
    peer: str
    own: str
    challenges: tuple[str, str] | None = None
    proved: bool = False
    has_heard: bool = False
    heard: bytearray = field(default_factory=bytearray)
    unsent: list[memoryview] = field(default_factory=list)


class Callers:
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
        arrived: Callable[[Caller, str], None],
        left: Callable[[Caller], None],
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
        self._strangers: dict[Caller, None] = {}  # a dict keeps the order in which they came
        self._ranks: dict[Caller, None] = {}
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
        for stranger in list(self._strangers):
            new = stranger.came > now - _STRANGER_SECONDS
            if new and len(self._strangers) <= self._most_strangers:
                break
            self.dismiss(stranger)

    def deliver(
        self,
        message: dict[str, Any],
        patience: float,
        heard: bool = False,
        to: Sequence[Caller] | None = None,
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
        callers = list(self._ranks if to is None else to)
        for caller in callers:
            caller.has_heard = False
            proof = self._credentials.proof("message", "".join(caller.challenges or ()), digest)
            self._queue(caller, encode({"proof": proof}), line)
        limit = self._clock() + patience
        while callers and self._clock() < limit:
            last = callers[-1]
            owes = last.unsent or (heard and not last.has_heard)
            if owes and last.connection.fileno() >= 0:
                self.attend(min(limit - self._clock(), _FULL_SECONDS))
            else:
                callers.pop()  # who is done stays done: nobody is looked at again

    def dismiss(self, caller: Caller) -> None:
        """Close a connection."""
        if caller.connection.fileno() < 0:
            return
        self.watch(caller.connection, 0, None)
        caller.connection.close()
        self._strangers.pop(caller, None)
        if caller in self._ranks:
            del self._ranks[caller]
            self._left(caller)

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
            connection, peer = listener.accept()
            own = connection.getsockname()
        except OSError as error:
            if error.errno in _FULL:
                self.trouble = f"{error.strerror} (ulimit -n)"
                self._make_room(listener)
            return  # or it left before it was let in
        connection.setblocking(False)
        caller = Caller(connection, self._clock(), _plain(peer[0]), _plain(own[0]))
        self._strangers[caller] = None
        self.watch(connection, selectors.EVENT_READ, partial(self._serve, caller))

    def _make_room(self, listener: socket.socket) -> None:
        """For a rank, at a stranger's cost; else nobody is let in for a moment."""
        for stranger in list(self._strangers)[:1]:
            self.dismiss(stranger)
            return
        self.watch(listener, 0, None)
        self._full_until = self._clock() + _FULL_SECONDS

    def _serve(self, caller: Caller, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(caller)
        if events & selectors.EVENT_READ and caller.connection.fileno() >= 0:
            self._hear(caller)

    def _hear(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.heard += data
        line, newline, rest = bytes(caller.heard).partition(b"\n")
        longest = LONGEST_HELLO if caller.challenges else LONGEST_GREETING
        if newline:
            caller.heard = bytearray(rest)
            self._understand(caller, decode(line) or {})
        elif not data or len(caller.heard) > longest:
            self.dismiss(caller)

    def _understand(self, caller: Caller, said: dict[str, Any]) -> None:
        """A greeting, a hello, or that a message was heard."""
        if caller.proved:
            caller.has_heard = "heard" in said
        elif caller.challenges:
            self._let_in(caller, said, caller.challenges[1])
        elif said.get("start") == self._credentials.start and "challenge" in said:
            caller.challenges = str(said["challenge"]), Credentials.challenge()
            proof = self._credentials.proof("host", caller.challenges[0])
            answer = {"start": said["start"], "proof": proof, "challenge": caller.challenges[1]}
            self._queue(caller, encode(answer))
        else:
            self.dismiss(caller)

    def _let_in(self, caller: Caller, said: dict[str, Any], challenge: str) -> None:
        hello = str(said.get("hello"))
        if not self._credentials.proves(said.get("proof"), "guest", challenge, hello):
            self.dismiss(caller)
            return
        try:
            keep_alive(caller.connection)
        except OSError:
            self.dismiss(caller)
            return
        del self._strangers[caller]
        self._ranks[caller] = None
        caller.proved = True
        self._arrived(caller, hello)

    def _queue(self, caller: Caller, *lines: bytes) -> None:
        """Send as much as the connection takes, and the rest when it takes more."""
        # Not joined: a roll goes to thousands.
        caller.unsent += map(memoryview, lines)
        self._send(caller)

    def _send(self, caller: Caller) -> None:
        try:
            sent = caller.connection.sendmsg(caller.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.dismiss(caller)
            return
        while sent:
            gone = min(sent, len(caller.unsent[0]))
            caller.unsent[0] = caller.unsent[0][gone:]
            sent -= gone
            if not caller.unsent[0]:
                del caller.unsent[0]
        more = selectors.EVENT_WRITE if caller.unsent else 0
        self.watch(caller.connection, selectors.EVENT_READ | more, partial(self._serve, caller))


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
