"""What the doctor found: a subject, how bad it is, and what to type."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = [
    "OK",
    "PROBLEM",
    "WARNING",
    "Finding",
    "merged",
    "of_rank",
    "plain",
    "spans",
    "to_tell",
    "worst_last",
]

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_ORDER = (OK, WARNING, PROBLEM)
# What travels in the rendezvous has to stay short: with thousands of ranks it is one message.
_LONGEST = 400
_MOST = 40


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at, such as "torch".
        level: "ok", "warning" or "problem".
        found: a line for people.
        fix: what to type; empty where all is well.
        ranks: whose machine or process it was found at.
    """

    subject: str
    level: str
    found: str
    fix: str = ""
    ranks: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return {**asdict(self), "ranks": list(self.ranks)}


def to_tell(findings: Iterable[Finding]) -> list[list[str]]:
    """What one rank tells the others: all but what is well, as JSON."""
    wrong = [one for one in findings if one.level != OK]
    return [[one.subject, one.level, one.found[:_LONGEST], one.fix[:_LONGEST]] for one in wrong][
        :_MOST
    ]


def merged(told: Sequence[Sequence[Sequence[str]]]) -> list[Finding]:
    """One finding for all ranks that say the same; warnings first, problems last.

    Args:
        told: by rank, what `to_tell` made.
    """
    seen: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, findings in enumerate(told):
        for subject, level, text, fix in findings:
            seen.setdefault((subject, level, text, fix), []).append(rank)
    found = []
    for (subject, level, text, fix), ranks in seen.items():
        found.append(Finding(subject, level, text, fix, tuple(ranks)))
    return worst_last(found)


def worst_last(findings: Iterable[Finding]) -> list[Finding]:
    """In their order, but problems at the end."""
    return sorted(findings, key=lambda one: _ORDER.index(one.level))


def of_rank(findings: Iterable[Finding], rank: int) -> list[Finding]:
    """The findings as those of one rank."""
    return [replace(one, ranks=(rank,)) for one in findings]


def spans(numbers: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def plain(value: object) -> str:
    """On one line, and without what would move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in str(value)).strip()
