"""The key-value store of horovodrun: values under /scope/key over HTTP.

The protocol is that of HTTPStore in horovod/common/gloo/http_store.cc, Horovod 0.28.1: PUT, GET
(404 while there is no value) and DELETE. hpctrain's own requests wait for a value with `Prefer:
wait=SECONDS` (RFC 7240) in place of polling.

    python -m hpctrain.rendezvous.http_store FD

serves such a store on a listening socket until the process is ended.
"""

import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["REQUEST_SECONDS", "Handler", "HttpStore"]

REQUEST_SECONDS = 10.0  # for a client to send its request
_LONGEST_VALUE = 1 << 20  # bytes; gloo's values have some hundred
_WAIT_SECONDS = 30  # longest wait of one request for a value that does not exist yet


class HttpStore(ThreadingHTTPServer):
    """The store: `serve_forever` serves it.

    Args:
        listener: listening socket; `server_close` closes it.

    Attributes:
        values: value of each path.
        changed: condition that is notified of each change of `values`, and holds their lock.
        closed: whether the store is being closed; then no request waits for a value.
    """

    daemon_threads = True
    block_on_close = False  # a client may wait for a value that is never set

    def __init__(self, listener: socket.socket, handler: "type[Handler] | None" = None) -> None:
        super().__init__(listener.getsockname()[:2], handler or Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.closed = False
        self.values: dict[str, bytes] = {}
        self.awaited: dict[str, threading.Event] = {}
        self.changed = threading.Condition(threading.RLock())

    def stop_waiting(self) -> None:
        """Answer all requests that wait for a value."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            for event in self.awaited.values():
                event.set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: the client left early, or is an unknown peer."""


class Handler(BaseHTTPRequestHandler):
    """The handler of one request."""

    server: HttpStore
    timeout = REQUEST_SECONDS

    def do_PUT(self) -> None:
        """Store a value under a path, in place of any earlier one."""
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
        """Return the value under a path."""
        server, path = self.server, self.path
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
        """Delete a value, as all ranks have found each other."""
        with self.server.changed:
            self.server.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *args: object) -> None:
        """Do nothing."""


if __name__ == "__main__":
    HttpStore(socket.socket(fileno=int(sys.argv[1]))).serve_forever()
