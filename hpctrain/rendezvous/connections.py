"""Connections that never block, each with a conversation: a generator that receives lines."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial

from hpctrain.rendezvous.messages import (
    LONGEST_GREETING,
    Clock,
    Credentials,
    decode,
    encode,
)

__all__ = ["FULL_SECONDS", "Connection", "Connections", "Conversation", "greet"]

# Yields the length of the longest line that may come next, and receives that line. An OSError
# inside ends the connection. A connection that is lost raises an OSError inside.
Conversation = Generator[int, bytes, None]

# Pause when the process may open no more files.
FULL_SECONDS = 0.1
_LONGEST_POLL = 60.0  # the system's timers have a limit
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPTED_AT_ONCE = 64  # the other connections are served in between


@dataclass(slots=True, eq=False)
class Connection:
    """A connection to another process.

    Attributes:
        socket: non-blocking socket.
        address: address of the other side.
        began: time at which it began, by the clock.
        conversation: conversation with the other side.
        longest: length of the longest line that the conversation accepts.
        connecting: whether the system has not yet connected it.
        received: bytes that are not yet a line.
        unsent: bytes that are still to be sent.
        challenges: challenges of both sides, joined, once the other side has given its proof.
        confirmed: whether the other side has confirmed the last message.
    """

    socket: socket.socket
    address: str
    began: float
    conversation: Conversation
    longest: int = 0
    connecting: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    challenges: str = ""
    confirmed: bool = False

    @property
    def open(self) -> bool:
        """Whether it has not been closed."""
        return self.socket.fileno() >= 0


class Connections:
    """Connections that share one loop, `poll`.

    Args:
        clock: clock in seconds.

    Attributes:
        accept_error: why a connection could not be accepted, or "".
    """

    def __init__(self, clock: Clock) -> None:
        self.accept_error = ""
        self._clock = clock
        self._selector = selectors.DefaultSelector()

    def connect(
        self, place: tuple[str, int], converse: Callable[[Connection], Conversation]
    ) -> Connection:
        """Begin to connect to an address and port; its conversation waits for the connection.

        Raises:
            OSError: the address cannot be reached.
        """
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        opened = socket.socket(family, socket.SOCK_STREAM)
        opened.setblocking(False)
        try:
            _raise(opened.connect_ex(place), errno.EINPROGRESS)
        except OSError:
            opened.close()
            raise
        connection = self._converse(opened, place[0], converse)
        connection.connecting = True
        self._selector.register(opened, selectors.EVENT_WRITE, connection)
        return connection

    def accept(
        self, listener: socket.socket, converse: Callable[[Connection], Conversation]
    ) -> None:
        """Accept connections from now on.

        Args:
            listener: non-blocking, listening socket.
            converse: function that returns the conversation of a new connection.
        """
        accept = partial(self._accept, listener, converse)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    @property
    def busy(self) -> bool:
        """Whether there is any socket to wait for."""
        return bool(self._selector.get_map())

    def poll(self, seconds: float) -> None:
        """Handle the connections that are ready; wait for the first at most some seconds."""
        for key, events in self._selector.select(min(max(0.0, seconds), _LONGEST_POLL)):
            if not isinstance(key.data, Connection):
                key.data()
            elif key.data.open:  # an earlier conversation may have closed it
                self._handle(key.data, events)

    def send(self, connection: Connection, *lines: bytes) -> None:
        """Send as much as the connection accepts, and the rest when it accepts more.

        Raises:
            OSError: the connection is lost.
        """
        sent = 0
        if not connection.unsent:
            with contextlib.suppress(BlockingIOError):
                sent = connection.socket.sendmsg(lines)
        if sent < sum(map(len, lines)):
            connection.unsent += b"".join(lines)[sent:]
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(connection.socket, both, connection)

    def close(self, connection: Connection, error: OSError | None = None) -> None:
        """Close a connection; its conversation gets the error, or ends without one."""
        if not connection.open:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if error is None:
            connection.conversation.close()
            return
        with contextlib.suppress(OSError, StopIteration):
            connection.conversation.throw(error)

    def close_all(self) -> None:
        """Close all connections, but no listening socket."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Connection):
                self.close(key.data)
        self._selector.close()

    def _converse(
        self, opened: socket.socket, address: str, converse: Callable[[Connection], Conversation]
    ) -> Connection:
        connection = Connection(opened, address, self._clock(), None)  # type: ignore[arg-type]
        connection.conversation = converse(connection)
        connection.longest = next(connection.conversation)
        return connection

    def _accept(
        self, listener: socket.socket, converse: Callable[[Connection], Conversation]
    ) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                opened, address = listener.accept()
            except OSError as error:
                if error.errno in _FULL:
                    self.accept_error = f"{error.strerror} (ulimit -n)"
                    time.sleep(FULL_SECONDS)
                return  # or there is none, or the peer has closed it
            opened.setblocking(False)
            connection = self._converse(opened, _plain(address[0]), converse)
            self._selector.register(opened, selectors.EVENT_READ, connection)

    def _handle(self, connection: Connection, events: int) -> None:
        try:
            if connection.connecting:
                _check_connected(connection.socket)
                connection.connecting = False
                self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
                self._continue(connection, b"")
                return
            if events & selectors.EVENT_WRITE:
                del connection.unsent[: connection.socket.send(connection.unsent)]
                if not connection.unsent:
                    self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(connection, error)

    def _receive(self, connection: Connection) -> None:
        data = connection.socket.recv(1 << 16)
        connection.received += data
        while connection.open and (end := connection.received.find(b"\n") + 1):
            line = bytes(connection.received[:end])
            del connection.received[:end]
            self._continue(connection, line)
        if not data or len(connection.received) > connection.longest:
            _raise(errno.ECONNRESET)

    def _continue(self, connection: Connection, line: bytes) -> None:
        try:
            connection.longest = connection.conversation.send(line)
        except StopIteration:
            self.close(connection)


def greet(
    connections: Connections, connection: Connection, credentials: Credentials
) -> Generator[int, bytes, str]:
    """Wait for a connection, and find out whether rank 0 of this start is there.

    Returns:
        The challenge of rank 0; that of this side comes first in `connection.challenges`.

    Raises:
        OSError: another program listens there, or none.
    """
    yield 0
    own = Credentials.challenge()
    connections.send(connection, encode({"start": credentials.start, "challenge": own}))
    answer = decode((yield LONGEST_GREETING))
    if credentials.proves(answer.get("proof"), "host", own):
        theirs = str(answer.get("challenge"))
        connection.challenges = own + theirs
        return theirs
    if answer.get("start") == credentials.start:
        raise OSError(errno.EACCES, "this start, with another HPCTRAIN_SECRET")
    raise OSError(errno.EACCES, "another program listens there")


def _check_connected(connection: socket.socket) -> None:
    """Raise an error if a connection was not made.

    Raises:
        OSError: nothing listens there.
    """
    _raise(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    if connection.getsockname() == connection.getpeername():
        # On a free local port TCP can connect a socket to itself.
        _raise(errno.ECONNREFUSED)


def _raise(code: int, *expected: int) -> None:
    """Raise the error of an errno number, unless the number is 0 or expected.

    Raises:
        OSError: the error of that number.
    """
    if code and code not in expected:
        raise OSError(code, os.strerror(code))


def _plain(address: str) -> str:
    """Return the IPv4 form of an IPv4 address from an IPv6 socket."""
    return address.removeprefix("::ffff:")
