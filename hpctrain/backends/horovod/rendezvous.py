"""The server through which Horovod's ranks find each other: values under /scope/key over HTTP.

Rank 0 serves them on the socket that the rendezvous bound. So it works under any launcher, without
ssh and without MPI. hpctrain stores its own values there as well. Each rank keeps a connection
open; when it ends, rank 0 records that the rank is gone.

`hpctrain.rendezvous.http_store` describes the protocol.
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
from typing import Any
from urllib.parse import quote

from hpctrain.rendezvous.http_store import REQUEST_SECONDS, Handler, HttpStore
from hpctrain.rendezvous.messages import keep_alive

__all__ = ["Client", "RankZeroTimeoutError", "Server", "be_present"]

_PRESENCE = "/hpctrain/presence/"


class RankZeroTimeoutError(RuntimeError):
    """Rank 0 is running, but does not answer."""


class Server:
    """The server of the values and of rank presence, in threads of rank 0, until `close`.

    Args:
        listener: listening socket; `close` closes it.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._http = _Http(listener)
        self._presences = self._http.presences
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True),
            threading.Thread(target=self._presences.watch, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """Whether the server is closed."""
        return self._http.closed

    def gone(self) -> set[int]:
        """Return the ranks that were present and whose connection has ended without notice."""
        with self._http.changed:
            return set(self._presences.gone)

    def left(self) -> set[int]:
        """Return the ranks that have sent notice that they leave."""
        with self._http.changed:
            return set(self._presences.left)

    def send_line(self, line: str) -> None:
        """Send a line to all ranks that are present."""
        self._presences.send_line(line.encode() + b"\n")

    def read(self, scope: str) -> dict[str, bytes]:
        """Return the values that hpctrain has stored in a scope, by key."""
        start = f"/hpctrain/{scope}/"
        with self._http.changed:
            values = self._http.values.items()
            return {k.removeprefix(start): v for k, v in values if k.startswith(start)}

    def wait(self, until: Callable[[], bool], timeout: float) -> bool:
        """Wait for a condition on values or presence; return whether it was met in time."""
        end = time.monotonic() + timeout
        with self._http.changed:
            while not until():
                if (left := end - time.monotonic()) <= 0 or self.closed:
                    return False
                self._http.changed.wait(left)
        return True

    def close(self) -> None:
        """Stop the server."""
        self._http.stop_waiting()
        self._http.shutdown()
        self._http.server_close()
        self._presences.close()
        for thread in self._threads:
            thread.join()


class _Presences:
    """The connections of the ranks, all handled by one thread."""

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

    def watch(self) -> None:
        """Record the connections that end, until `close`."""
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
                    notice = b""
                    with contextlib.suppress(OSError):  # its host is lost
                        notice = connection.recv(1)
                    connection.close()
                    (self.left if notice else self.gone).add(rank)
                    self._changed.notify_all()

    def send_line(self, line: bytes) -> None:
        with self._changed:
            for _, connection in self._open.values():
                with contextlib.suppress(OSError):  # it is gone, which `watch` records
                    connection.sendall(line)

    def close(self) -> None:
        os.write(self._wake, b".")
        with self._changed:
            for _, connection in self._open.values():
                connection.close()
            self._open.clear()


class _Http(HttpStore):
    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener, _Handler)
        self.presences = _Presences(self.changed)

    def shutdown_request(self, request: Any) -> None:
        """End a request, but keep the connection of a present rank."""
        if request.fileno() not in self.presences:
            super().shutdown_request(request)


class _Handler(Handler):
    server: _Http

    def do_GET(self) -> None:  # noqa: N802, its name in http.server
        """Return the value under a path; or register a present rank and keep its connection."""
        rank = self.path.removeprefix(_PRESENCE)
        if self.path.startswith(_PRESENCE) and rank.isdecimal():
            self.server.presences.add(int(rank), self.connection)
            return
        super().do_GET()


def be_present(address: str, port: int, rank: int) -> socket.socket:
    """Open a connection whose end shows rank 0 that this rank is gone, whatever the cause.

    One byte before the end means that the rank leaves normally. Rank 0 sends lines over it.

    Raises:
        OSError: there is no server.
    """
    connection = socket.create_connection((address, port), REQUEST_SECONDS)
    connection.settimeout(None)
    connection.sendall(f"GET {_PRESENCE}{rank} HTTP/1.0\r\n\r\n".encode())
    keep_alive(connection)
    return connection


class Client:
    """The client of the server, usable as a store for `barrier`.

    Args:
        address, port: address and port of the server.
        scope: scope of the keys.
    """

    def __init__(self, address: str, port: int, scope: str) -> None:
        self._place, self._scope = (address, port), scope

    def set(self, key: str, value: str) -> None:
        """Store a value under a key."""
        self._request("PUT", key, value.encode())

    def get(self, key: str) -> bytes:
        """Return the value of a key; raise RuntimeError if there is none."""
        value = self._request("GET", key)
        if value is None:
            raise RuntimeError(f"no value under {key}")
        return value

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Wait until all keys exist; raise RuntimeError if they do not exist in time."""
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            while self._request("GET", key, wait=(left := end - time.monotonic())) is None:
                if left <= 0:
                    raise RuntimeError(f"no value under {key} in time")

    def check(self, keys: list[str]) -> bool:
        """Check whether all keys exist."""
        return all(self._request("GET", key) is not None for key in keys)

    def _request(
        self, method: str, key: str, body: bytes | None = None, wait: float = 0.0
    ) -> bytes | None:
        path = quote(f"/hpctrain/{self._scope}/{key}")
        headers = {"Prefer": f"wait={math.ceil(wait)}"} if wait > 0 else {}
        limit = max(wait, 0.0) + REQUEST_SECONDS
        connection = http.client.HTTPConnection(*self._place, timeout=limit)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            value = answer.read()
        except TimeoutError:
            raise RankZeroTimeoutError("rank 0 does not answer") from None
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"rank 0 is gone: {error}") from None
        finally:
            connection.close()
        return value if answer.status == HTTPStatus.OK else None
