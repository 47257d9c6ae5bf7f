"""What a rule says of a script."""

from dataclasses import dataclass

__all__ = ["Finding", "shown"]

_LONGEST = 60


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        line: in the script, from 1.
        rule: its short name, which stays the same from version to version.
        reason: what happens on the cluster.
        fix: what to type.
    """

    line: int
    rule: str
    reason: str
    fix: str


def shown(text: str) -> str:
    """A part of the script that is fit to be printed: one short line without control characters."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= _LONGEST else clean[: _LONGEST - 1] + "…"
