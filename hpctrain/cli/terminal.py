"""Standard output of commands that show names: a terminal may know fewer characters than these."""

import sys

__all__ = ["put"]


def put(text: str) -> None:
    """Write to standard output, with ? for each character that its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
