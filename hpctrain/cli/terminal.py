"""Output of commands: names for terminals that lack some characters, and lines for people."""

import sys

__all__ = ["INTERRUPTED", "note", "put"]

INTERRUPTED = 130  # a shell's exit code after Ctrl-C


def put(text: str) -> None:
    """Write to standard output, with ? for each character that its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def note(line: str) -> None:
    """Write a line to standard error at once."""
    sys.stderr.write(f"hpctrain: {line}\n")
    sys.stderr.flush()
