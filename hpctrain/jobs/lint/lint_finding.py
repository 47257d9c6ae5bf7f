"""Finding of a rule in a script."""

from dataclasses import dataclass

from hpctrain.cluster.texts import printable, shortened

__all__ = ["Found", "LintFinding", "shown"]

_LONGEST = 60

#: What the rules yield: line number, name of the rule, reason, and one or more fixes.
Found = tuple[int, str, str, *tuple[str, ...]]


@dataclass(frozen=True, order=True)
class LintFinding:
    """One error in a script.

    Attributes:
        line: line number in the script, from 1.
        rule: short name of the rule, which is the same in all versions.
        reason: effect of the error on the cluster.
        fixes: texts to type instead, each one on its own enough.
    """

    line: int
    rule: str
    reason: str
    fixes: tuple[str, ...]


def shown(text: str) -> str:
    """Return a part of the script for messages: one short line without control characters."""
    return shortened(printable(text), _LONGEST)
