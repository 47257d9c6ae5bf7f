"""Standard output of commands that show names, for terminals that lack some characters."""

import sys

__all__ = ["put"]


def put(text: str) -> None:
    """Write to standard output, with ? for each character that its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
