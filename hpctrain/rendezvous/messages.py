"""Messages of the rendezvous: lines of JSON, and the proof that a peer belongs to the start."""

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster.launchers.base import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.rendezvous.key_value_store import KeyValueStore

__all__ = [
    "GRACE_SECONDS",
    "LONGEST_HELLO",
    "LONGEST_LINE",
    "STATUS_SECONDS",
    "Announce",
    "Clock",
    "Credentials",
    "Entry",
    "Participant",
    "decode",
    "encode",
    "hello",
    "keep_alive",
    "read_hello",
]

LONGEST_LINE = 1 << 26
LONGEST_HELLO = 1 << 17
# The other ranks wait this much longer than rank 0, which sends them the list of missing ranks.
GRACE_SECONDS = 5.0
# Time between two status lines for the user while waiting takes long.
STATUS_SECONDS = 10.0

Entry = dict[str, Any]
Announce = Callable[[str], None]
Clock = Callable[[], float]


class Credentials:
    """The shared secret of the ranks of one start, and its proof, which does not reveal it.

    Each side sends a random challenge and answers the other's with an HMAC (RFC 2104) under a key
    that both derive from the start's key and the secret. A process that only listens on the port,
    or connects to it, learns nothing that gives access to the rendezvous.

    Args:
        key: key of the start, the same on all of its ranks.
        secret: secret that only the ranks of the start have; may be empty. Then any process that
            has or guesses the key is accepted.
    """

    def __init__(self, key: str, secret: str) -> None:
        #: Public name of the start.
        self.start = hashlib.sha256(_bytes(f"start/{key}")).hexdigest()[:32]
        self._shared = hmac.digest(_bytes(f"shared/{secret}"), _bytes(key), "sha256")

    @staticmethod
    def challenge() -> str:
        """Return a new random challenge."""
        return secrets.token_hex(16)

    def proof(self, side: str, challenge: str, text: str = "") -> str:
        """Return the answer to a challenge.

        Args:
            side: "host", "client" or "message" (a later message of the host). An answer is valid
                for one of them only, so it cannot be sent back to its sender.
            challenge: challenge of the other side; for a message both, the client's first.
            text: text that the answer proves.
        """
        message = json.dumps([side, challenge, text]).encode()
        return hmac.digest(self._shared, message, "sha256").hex()

    def proves(self, given: object, side: str, challenge: str, text: str = "") -> bool:
        """Check whether `given` is the answer that `proof` returns."""
        expected = self.proof(side, challenge, text).encode()
        return hmac.compare_digest(str(given).encode(errors="replace"), expected)


@dataclass(frozen=True, slots=True)
class Participant:
    """This rank, as it takes part in a rendezvous.

    Attributes:
        world, point: place of this rank and rendezvous point, from its launcher.
        credentials: credentials of this start.
        hello: text with which this rank introduces itself.
        store: key-value store in which rank 0 publishes its addresses, or None.
        timeout: seconds to wait for all ranks.
        announce: function called with a status line for the user when waiting takes long.
        noun: what a rank is called in texts.
        option: option that sets `timeout`; empty without one.
        clock: clock in seconds, for every time-out.
    """

    world: World
    point: RendezvousPoint
    credentials: Credentials
    hello: str
    store: KeyValueStore | None
    timeout: float
    announce: Announce
    noun: str
    option: str
    clock: Clock


def hello(rank: int, size: int, own: Entry, given: Entry) -> str:
    """Return the text with which a rank introduces itself to rank 0.

    Most ranks have the same objects in their entries. An object is a text of its own here, so that
    rank 0 decodes and compares it once for all ranks that send the same one.

    Args:
        rank, size: rank of this process, and number of ranks.
        own: values of the rendezvous.
        given: values of its caller.
    """
    objects = {name: json.dumps(v) for name, v in given.items() if isinstance(v, dict | list)}
    own = {name: value for name, value in given.items() if name not in objects} | own
    return json.dumps([rank, size, own, objects])


def read_hello(text: str, known: dict[str, Any]) -> tuple[int, int, Entry]:
    """Return the rank, world size and entry from a text of `hello`.

    Args:
        text: text from a peer.
        known: all objects read so far, by their texts; equal ones become one Python object.

    Raises:
        ValueError: the text has another format.
    """
    try:
        rank, size, entry, objects = json.loads(text)
        for name, of_object in objects.items():
            if of_object not in known:
                known[of_object] = json.loads(of_object)
            entry[name] = known[of_object]
        place = entry["world"]
        whole = type(rank) is type(size) is type(place["local_rank"]) is int and 0 <= rank < size
        if not whole or not {"host", "pid", "process", "address"} <= entry.keys():
            raise ValueError(text)
        entry["world"] = {"node_rank": None, "hosts": None, **place}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(text) from error
    return rank, size, entry


def encode(message: object) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Decode a message; return {} if the line is not a message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def keep_alive(connection: socket.socket, seconds: int = 20, interval: int = 5) -> None:
    """Let a connection to a lost host end by itself.

    Args:
        connection: connection, or a listening socket for all that it accepts.
        seconds: time after which the connection ends.
        interval: time between two questions to the other kernel.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPALIVE": interval,  # its name on macOS
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": seconds // interval - 1,
        # Keep-alive pauses while sent data is not acknowledged.
        "TCP_USER_TIMEOUT": seconds * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bytes(text: str) -> bytes:
    """Return the original bytes of a text from the environment, which may hold any bytes."""
    return text.encode(errors="surrogateescape")
