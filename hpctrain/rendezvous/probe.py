"""A knock at a place where rank 0 may listen: does it belong to this start?"""

import errno
import os
import selectors
import socket

from hpctrain.rendezvous.messages import LONGEST_GREETING, Clock, Credentials, decode, encode

__all__ = ["Probe"]


class Probe:
    """A connection that may be to rank 0, and never blocks.

    Args:
        place: address and port.
        credentials: of the start.
        clock: tells when it began.

    Attributes:
        connection: to whoever is there.
        place: as given.
        challenge: what whoever is there has to answer.
        began: when, by the clock.
        awaits: the event of `selectors` after which `go_on` has something to do.

    Raises:
        OSError: there is no way to that address.
    """

    def __init__(self, place: tuple[str, int], credentials: Credentials, clock: Clock) -> None:
        self.place = place
        self.began = clock()
        self.awaits = selectors.EVENT_WRITE
        self._credentials = credentials
        self.challenge = Credentials.challenge()
        self._heard = b""
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self.connection = socket.socket(family, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        try:
            _raise(self.connection.connect_ex(place), errno.EINPROGRESS)
        except OSError:
            self.connection.close()
            raise

    def go_on(self) -> str | None:
        """Rank 0's challenge, once it has proved that it belongs to this start; None before.

        Raises:
            OSError: it is somebody else, or nobody.
        """
        if self.awaits == selectors.EVENT_WRITE:
            _raise(self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            if self.connection.getsockname() == self.connection.getpeername():
                # On a free local port TCP can connect a socket to itself.
                _raise(errno.ECONNREFUSED)
            greeting = {"start": self._credentials.start, "challenge": self.challenge}
            self.connection.sendall(encode(greeting))  # within the socket's buffer
            self.awaits = selectors.EVENT_READ
            return None
        try:
            data = self.connection.recv(LONGEST_GREETING)
        except BlockingIOError:
            return None
        self._heard += data
        if b"\n" not in self._heard and data and len(self._heard) < LONGEST_GREETING:
            return None
        answer = decode(self._heard.partition(b"\n")[0]) or {}
        if self._credentials.proves(answer.get("proof"), "host", self.challenge):
            return str(answer.get("challenge"))
        if answer.get("start") == self._credentials.start:
            raise OSError(errno.EACCES, "this start, with another HPCTRAIN_SECRET")
        raise OSError(errno.EACCES, "somebody else listens there")


def _raise(code: int, *expected: int) -> None:
    """The error behind a number of errno, unless it is 0 or expected.

    Raises:
        OSError: it is.
    """
    if code and code not in expected:
        raise OSError(code, os.strerror(code))
