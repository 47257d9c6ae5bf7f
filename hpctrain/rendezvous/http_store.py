"""The key-value store of horovodrun: values under /scope/key over HTTP.

The protocol is that of HTTPStore in horovod/common/gloo/http_store.cc, Horovod 0.28.1: PUT, GET
(404 while there is no value), and DELETE of its own number by a rank that has connected to all
others. The values of a scope stay until all ranks in it have sent that: a rank that is slower still
reads those of the others, and the next `hvd.init()` must find none. Horovod's own server
(horovod/runner/http/http_server.py) forgets who has sent it when another scope is complete. Then a
later `hvd.init()` finds old addresses, and the process aborts.

    python -m hpctrain.rendezvous.http_store FD

serves such a store on a listening socket until the process is ended.
"""

import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["HttpStore"]

_REQUEST_SECONDS = 10.0  # for a client to send its request
_LONGEST_VALUE = 1 << 20  # bytes; gloo's values have some hundred


class HttpStore(ThreadingHTTPServer):
    """The store: `serve_forever` serves it, or `handle_request` when a client connects.

    Args:
        listener: listening socket; `server_close` closes it.

    Attributes:
        scopes: values of each scope by their keys.
        lock: lock to hold while `scopes` are used.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.scopes: dict[str, dict[str, bytes]] = {}
        self.lock = threading.Lock()
        self._done: dict[str, set[str]] = {}

    def finish(self, scope: str, rank: str) -> None:
        """Note that a rank needs no value of a scope any more; clear it after the last one."""
        done = self._done.setdefault(scope, set())
        done.add(rank)
        # All ranks have stored their addresses, or this one would not be connected to them.
        if done >= {key for key in self.scopes.get(scope, {}) if key.isdecimal()}:
            self.scopes.pop(scope, None)
            del self._done[scope]

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: the client left early, or is an unknown peer."""


class _Handler(BaseHTTPRequestHandler):
    """The handler of one request."""

    server: HttpStore
    timeout = _REQUEST_SECONDS

    def do_PUT(self) -> None:
        """Store a value under a path, in place of any earlier one."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST_VALUE:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        value = self.rfile.read(int(length))
        scope, key = self._place()
        with self.server.lock:
            self.server.scopes.setdefault(scope, {})[key] = value
        self._answer(HTTPStatus.OK)

    def do_GET(self) -> None:
        """Return the value under a path."""
        scope, key = self._place()
        with self.server.lock:
            value = self.server.scopes.get(scope, {}).get(key)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_DELETE(self) -> None:
        """Note that a rank of a scope has connected to all others."""
        with self.server.lock:
            self.server.finish(*self._place())
        self._answer(HTTPStatus.OK)

    def _place(self) -> tuple[str, str]:
        """Return the scope and the key of a path."""
        scope, _, key = self.path.rpartition("/")
        return scope, key

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *args: object) -> None:
        """Do nothing."""


if __name__ == "__main__":
    HttpStore(socket.socket(fileno=int(sys.argv[1]))).serve_forever()
