"""What ranks say to each other before they can talk: lines of JSON, and the proof of a start."""

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
    "NEWS_SECONDS",
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
# The others wait a little longer than rank 0, which knows who is missing and tells them.
GRACE_SECONDS = 5.0
# From one word to people to the next, while waiting takes long.
NEWS_SECONDS = 10.0

Entry = dict[str, Any]
Announce = Callable[[str], None]
Clock = Callable[[], float]


class Credentials:
    """What the ranks of one start know, and how they prove it without saying it.

    Each side sends a random challenge and answers the other's with an HMAC (RFC 2104) under a key
    that both derive from the start's key and the secret. So who only listens on the port, or
    knocks at it, learns nothing that opens the rendezvous.

    Args:
        key: of the start: the same on all of its ranks.
        secret: what only the ranks of the start know; may be empty, and then whoever knows or
            guesses the key passes.
    """

    def __init__(self, key: str, secret: str) -> None:
        #: What the start is called in the open.
        self.start = hashlib.sha256(_bytes(f"start/{key}")).hexdigest()[:32]
        self._shared = hmac.new(_bytes(f"shared/{secret}"), _bytes(key), "sha256").digest()

    @staticmethod
    def challenge() -> str:
        """Something new to be answered."""
        return secrets.token_hex(16)

    def proof(self, side: str, challenge: str, text: str = "") -> str:
        """The answer to a challenge.

        Args:
            side: "host", "client" or "message" (of the host, later): an answer is good for one
                thing alone, and cannot be sent back to where it came from.
            challenge: the other side's; of a message both, the client's first.
            text: what the answer vouches for.
        """
        said = json.dumps([side, challenge, text]).encode()
        return hmac.new(self._shared, said, "sha256").hexdigest()

    def proves(self, given: object, side: str, challenge: str, text: str = "") -> bool:
        """Whether `given` is that answer."""
        expected = self.proof(side, challenge, text).encode()
        return hmac.compare_digest(str(given).encode(errors="replace"), expected)


def _bytes(text: str) -> bytes:
    """As it was in the environment, which may hold any bytes."""
    return text.encode(errors="surrogateescape")


def encode(message: dict[str, Any]) -> bytes:
    """A message as it travels."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """A message, or None for anything that is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def keep_alive(connection: socket.socket) -> None:
    """Let a connection to a host that was lost end by itself, within twenty seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Keep-alive rests while something unacknowledged is under way.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


def pack(entries: Sequence[Entry]) -> str:
    """All entries, short: what they have in common once. They go to each rank.

    Returns:
        text: zlib (RFC 1950) in base64 over JSON, `{name: [value]}` where all have the same, else
        `{name: [value of rank 0, value of rank 1, …]}`.
    """
    names = dict.fromkeys(name for entry in entries for name in entry)
    columns = {name: [entry.get(name) for entry in entries] for name in names}
    common = {name: v[:1] if v.count(v[0]) == len(v) else v for name, v in columns.items()}
    return base64.b64encode(zlib.compress(json.dumps(common).encode(), 1)).decode()


def unpack(text: str, count: int) -> tuple[Entry, ...]:
    """The inverse of `pack`, for `count` entries."""
    columns = json.loads(zlib.decompress(base64.b64decode(text)))
    return tuple(
        {name: v[0] if len(v) == 1 else v[rank] for name, v in columns.items()}
        for rank in range(count)
    )
