"""The store of horovodrun, in the order in which Horovod's ranks use it."""

import http.client
import socket
import threading

import pytest

from hpctrain.rendezvous.http_store import HttpStore


@pytest.fixture
def ask():
    """Return a function that sends a request to a store, and returns status and value."""
    store = HttpStore(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=store.serve_forever, args=(0.02,), daemon=True).start()

    def send(method, path, value=None):
        connection = http.client.HTTPConnection(*store.server_address, timeout=60)
        connection.request(method, path, value)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content

    yield send
    store.shutdown()
    store.server_close()


def test_http_store_keeps_addresses_until_all_ranks_of_the_scope_are_connected(ask):
    """A rank that is early must neither strand a later one, nor clear another scope."""
    for rank in ("0", "1"):
        assert ask("PUT", f"/local_host/{rank}", b"address")[0] == 200
    ask("DELETE", "/local_host/0")
    for scope in ("/cross_0", "/cross_1"):  # each with one rank, complete at once
        ask("PUT", f"{scope}/0", b"")
        ask("DELETE", f"{scope}/0")
    assert ask("GET", "/local_host/0") == (200, b"address")
    ask("DELETE", "/local_host/1")
    for rank in ("0", "1"):  # as the next hvd.init() in these processes finds them
        assert ask("GET", f"/local_host/{rank}")[0] == 404
    assert ask("PUT", "/hpctrain/name", b"value")[0] == 200
    assert ask("GET", "/hpctrain/name") == (200, b"value")
