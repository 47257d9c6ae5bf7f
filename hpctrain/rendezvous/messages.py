"""Messages of the rendezvous: lines of JSON, and the proof that a peer belongs to the start."""

import base64
import hashlib
import hmac
import json
import secrets
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "GRACE_SECONDS",
    "LONGEST_GREETING",
    "LONGEST_HELLO",
    "LONGEST_LINE",
    "STATUS_SECONDS",
    "Announce",
    "Clock",
    "Credentials",
    "Entry",
    "decode",
    "encode",
    "keep_alive",
    "pack",
    "unpack",
]

# A roster of a million ranks would not fit; one of fifty thousand does.
LONGEST_LINE = 1 << 26
LONGEST_HELLO = 1 << 17
LONGEST_GREETING = 1 << 10
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
        self._shared = hmac.new(_bytes(f"shared/{secret}"), _bytes(key), "sha256").digest()

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
        return hmac.new(self._shared, message, "sha256").hexdigest()

    def proves(self, given: object, side: str, challenge: str, text: str = "") -> bool:
        """Check whether `given` is the answer that `proof` returns."""
        expected = self.proof(side, challenge, text).encode()
        return hmac.compare_digest(str(given).encode(errors="replace"), expected)


def _bytes(text: str) -> bytes:
    """Return the original bytes of a text from the environment, which may hold any bytes."""
    return text.encode(errors="surrogateescape")


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Decode a message; return None if the line is not a message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def keep_alive(connection: socket.socket) -> None:
    """Let a connection to a lost host end by itself, within twenty seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Keep-alive pauses while sent data is not acknowledged.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def pack(entries: Sequence[Entry]) -> str:
    """Compress all entries, as each rank gets them; common values are stored once.

    Returns:
        text: zlib (RFC 1950) in base64 over JSON, `{name: [value]}` if all ranks have the same
        value, else `{name: [value of rank 0, value of rank 1, …]}`.
    """
    names = dict.fromkeys(name for entry in entries for name in entry)
    columns = {name: [entry.get(name) for entry in entries] for name in names}
    common = {name: v[:1] if v.count(v[0]) == len(v) else v for name, v in columns.items()}
    return base64.b64encode(zlib.compress(json.dumps(common).encode(), 1)).decode()


def unpack(text: str, count: int) -> tuple[Entry, ...]:
    """Return the `count` entries from a text of `pack`."""
    columns = json.loads(zlib.decompress(base64.b64decode(text)))
    return tuple(
        {name: v[0] if len(v) == 1 else v[rank] for name, v in columns.items()}
        for rank in range(count)
    )
