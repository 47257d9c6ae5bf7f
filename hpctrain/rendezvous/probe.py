"""A probe that checks whether a listening socket belongs to rank 0 of this start."""

import errno
import os
import selectors
import socket

from hpctrain.rendezvous.messages import LONGEST_GREETING, Clock, Credentials, decode, encode

__all__ = ["Probe"]


class Probe:
    """A non-blocking connection to a place where rank 0 may listen.

    Args:
        place: address and port.
        credentials: credentials of this start.
        clock: clock in seconds, for `began`.

    Attributes:
        connection: socket of the connection.
        place: address and port, as given.
        challenge: challenge that the other side has to answer.
        began: time at which the connection began, by the clock.
        awaits: event of `selectors` after which to call `advance`.

    Raises:
        OSError: the address cannot be reached.
    """

    def __init__(self, place: tuple[str, int], credentials: Credentials, clock: Clock) -> None:
        self.place = place
        self.began = clock()
        self.awaits = selectors.EVENT_WRITE
        self._credentials = credentials
        self.challenge = Credentials.challenge()
        self._received = b""
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self.connection = socket.socket(family, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        try:
            _raise(self.connection.connect_ex(place), errno.EINPROGRESS)
        except OSError:
            self.connection.close()
            raise

    def advance(self) -> str | None:
        """Continue the probe; return rank 0's challenge after its proof, and None before.

        Raises:
            OSError: another program listens there, or none.
        """
        if self.awaits == selectors.EVENT_WRITE:
            _raise(self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            if self.connection.getsockname() == self.connection.getpeername():
                # On a free local port TCP can connect a socket to itself.
                _raise(errno.ECONNREFUSED)
            greeting = {"start": self._credentials.start, "challenge": self.challenge}
            self.connection.sendall(encode(greeting))  # fits into the socket's buffer
            self.awaits = selectors.EVENT_READ
            return None
        try:
            data = self.connection.recv(LONGEST_GREETING)
        except BlockingIOError:
            return None
        self._received += data
        if b"\n" not in self._received and data and len(self._received) < LONGEST_GREETING:
            return None
        answer = decode(self._received.partition(b"\n")[0]) or {}
        if self._credentials.proves(answer.get("proof"), "host", self.challenge):
            return str(answer.get("challenge"))
        if answer.get("start") == self._credentials.start:
            raise OSError(errno.EACCES, "this start, with another HPCTRAIN_SECRET")
        raise OSError(errno.EACCES, "another program listens there")


def _raise(code: int, *expected: int) -> None:
    """Raise the error of an errno number, unless the number is 0 or expected.

    Raises:
        OSError: the error of that number.
    """
    if code and code not in expected:
        raise OSError(code, os.strerror(code))
