"""What Horovod's ranks need to find each other: values under /scope/key by HTTP.

Rank 0 serves them on the socket that the rendezvous bound, so under any launcher, without ssh and
without MPI. Our own ranks leave word there as well, and each keeps a connection open, by whose end
rank 0 knows that the rank is gone.

The protocol is that of HTTPStore in horovod/common/gloo/http_store.cc, Horovod 0.28.1: PUT, GET
(404 while there is no value) and DELETE. Our own ranks wait for a value with `Prefer: wait=SECONDS`
(RFC 7240) in place of asking again and again.
"""

import contextlib
import datetime
import http.client
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

from hpctrain.rendezvous.messages import keep_alive

__all__ = ["Client", "NoAnswerError", "Server", "be_present"]

_LONGEST_VALUE = 1 << 20  # bytes; what gloo leaves is some hundred
_REQUEST_SECONDS = 10.0  # for a caller to say what it wants
_PRESENCE = "/hpctrain/presence/"
_WAIT_SECONDS = 30  # at most, of one request for a value that is not there yet


class NoAnswerError(RuntimeError):
    """Rank 0 is there, and says nothing."""


class Server:
    """The values, and who is present, served by threads of rank 0 until `close`.

    Args:
        listener: the listening socket; closed with this.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._http = _Http(listener)
        self._presences = self._http.presences
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True),
            threading.Thread(target=self._presences.attend, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether it serves no more."""
        return self._http.closed

    def gone(self) -> set[int]:
        """The ranks that were present, and whose connection has ended."""
        with self._http.changed:
            return set(self._presences.gone)

    def left(self) -> set[int]:
        """The ranks that have said that they leave."""
        with self._http.changed:
            return set(self._presences.left)

    def say(self, line: str) -> None:
        """A line for all ranks that are present."""
        self._presences.say(line.encode() + b"\n")

    def read(self, scope: str) -> dict[str, bytes]:
        """The values that our own ranks have left in a scope, by key."""
        start = f"/hpctrain/{scope}/"
        with self._http.changed:
            values = self._http.values.items()
            return {k.removeprefix(start): v for k, v in values if k.startswith(start)}

    def wait(self, until: Callable[[], bool], timeout: float) -> bool:
        """Wait for something that follows from values or presence; whether it came in time."""
        end = time.monotonic() + timeout
        with self._http.changed:
            while not until():
                if (left := end - time.monotonic()) <= 0 or self.closed:
                    return False
                self._http.changed.wait(left)
        return True

    def close(self) -> None:
        """Serve no more."""
        with self._http.changed:
            self._http.closed = True
            self._http.changed.notify_all()
            for event in self._http.awaited.values():
                event.set()
        self._http.shutdown()
        self._http.server_close()
        self._presences.close()
        for thread in self._threads:
            thread.join()


class _Presences:
    """The connections of the ranks: one thread looks after all of them."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._poll = select.epoll()
        self._end, self._wake = os.pipe()
        self._poll.register(self._end, select.EPOLLIN)
        self._open: dict[int, tuple[int, socket.socket]] = {}
        self.gone: set[int] = set()
        self.left: set[int] = set()

    def add(self, rank: int, connection: socket.socket) -> None:
        keep_alive(connection)
        with self._changed:
            self._open[connection.fileno()] = (rank, connection)
            self._poll.register(connection.fileno(), select.EPOLLIN)

    def __contains__(self, number: int) -> bool:
        with self._changed:
            return number in self._open

    def attend(self) -> None:
        """Note who ends; until `close`."""
        while True:
            for number, _ in self._poll.poll():
                if number == self._end:
                    self._poll.close()
                    os.close(self._end)
                    os.close(self._wake)
                    return
                with self._changed:
                    rank, connection = self._open.pop(number)
                    self._poll.unregister(number)
                    word = b""
                    with contextlib.suppress(OSError):  # its host is lost
                        word = connection.recv(1)
                    connection.close()
                    (self.left if word else self.gone).add(rank)
                    self._changed.notify_all()

    def say(self, line: bytes) -> None:
        with self._changed:
            for _, connection in self._open.values():
                with contextlib.suppress(OSError):  # it is gone, as will be noted
                    connection.sendall(line)

    def close(self) -> None:
        os.write(self._wake, b".")
        with self._changed:
            for _, connection in self._open.values():
                connection.close()
            self._open.clear()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a caller may wait for a value that never comes

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.closed = False
        self.values: dict[str, bytes] = {}
        self.awaited: dict[str, threading.Event] = {}
        self.changed = threading.Condition(threading.RLock())
        self.presences = _Presences(self.changed)

    def shutdown_request(self, request: Any) -> None:
        """The end of a request, but not of a presence."""
        if request.fileno() not in self.presences:
            super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a caller that left in the middle, or a stranger."""


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    timeout = _REQUEST_SECONDS

    def do_PUT(self) -> None:
        """A value under a path, in place of any earlier one."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST_VALUE:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        value = self.rfile.read(int(length))
        with self.server.changed:
            self.server.values[self.path] = value
            self.server.changed.notify_all()
            event = self.server.awaited.pop(self.path, None)
        if event is not None:
            event.set()
        self._answer(HTTPStatus.OK)

    def do_GET(self) -> None:
        """The value under a path; or the presence of a rank, whose connection stays open."""
        server, path = self.server, self.path
        rank = path.removeprefix(_PRESENCE)
        if path.startswith(_PRESENCE) and rank.isdecimal():
            server.presences.add(int(rank), self.connection)
            return
        preferred = self.headers.get("Prefer", "").removeprefix("wait=")
        patience = min(int(preferred), _WAIT_SECONDS) if preferred.isdecimal() else 0
        event = None
        with server.changed:
            if path not in server.values and patience and not server.closed:
                event = server.awaited.setdefault(path, threading.Event())
        if event is not None:
            event.wait(patience)
        with server.changed:
            value = server.values.get(path)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_DELETE(self) -> None:
        """Forget a value: all ranks have found each other."""
        with self.server.changed:
            self.server.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def be_present(address: str, port: int, rank: int) -> socket.socket:
    """A connection that tells rank 0 of a rank's end, however it comes; a byte says: in peace.

    What rank 0 has to say comes by it, in lines.

    Raises:
        OSError: there is no server.
    """
    connection = socket.create_connection((address, port), _REQUEST_SECONDS)
    connection.settimeout(None)
    connection.sendall(f"GET {_PRESENCE}{rank} HTTP/1.0\r\n\r\n".encode())
    keep_alive(connection)
    return connection


class Client:
    """The same values as a store for `assembly`.

    Args:
        address, port: of the server.
        scope: what these keys belong to.
    """

    def __init__(self, address: str, port: int, scope: str) -> None:
        self._place, self._scope = (address, port), scope

    def set(self, key: str, value: str) -> None:
        """Leave a value under a key."""
        self._ask("PUT", key, value.encode())

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        value = self._ask("GET", key)
        if value is None:
            raise RuntimeError(f"no value under {key}")
        return value

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Until all keys are there; RuntimeError when they are not in time."""
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            while self._ask("GET", key, wait=(left := end - time.monotonic())) is None:
                if left <= 0:
                    raise RuntimeError(f"no value under {key} in time")

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(self._ask("GET", key) is not None for key in keys)

    def _ask(
        self, method: str, key: str, body: bytes | None = None, wait: float = 0.0
    ) -> bytes | None:
        path = quote(f"/hpctrain/{self._scope}/{key}")
        headers = {"Prefer": f"wait={math.ceil(wait)}"} if wait > 0 else {}
        limit = max(wait, 0.0) + _REQUEST_SECONDS
        connection = http.client.HTTPConnection(*self._place, timeout=limit)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            value = answer.read()
        except TimeoutError:
            raise NoAnswerError("rank 0 does not answer") from None
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"rank 0 is gone: {error}") from None
        finally:
            connection.close()
        return value if answer.status == HTTPStatus.OK else None
