"""What ranks say to each other before they can talk: lines of JSON."""

import json
from collections.abc import Callable
from typing import Any

__all__ = [
    "GRACE_SECONDS",
    "LONGEST_HELLO",
    "LONGEST_LINE",
    "NEWS_SECONDS",
    "Announce",
    "Entry",
    "decode",
    "encode",
]

LONGEST_LINE = 1 << 26
LONGEST_HELLO = 1 << 16
# The others wait a little longer than rank 0, which knows who is missing and tells them.
GRACE_SECONDS = 5.0
# From one word to people to the next, while waiting takes long.
NEWS_SECONDS = 10.0

Entry = dict[str, Any]
Announce = Callable[[str], None]


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
