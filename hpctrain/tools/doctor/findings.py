"""Findings of the checks: a subject, a level, a text, and fixes."""

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
# Limits for one rank: the rendezvous sends the findings of all ranks, up to thousands, in one
# message.
_LONGEST = 400
_MOST = 40


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: subject of the check, such as "torch".
        level: "ok", "warning" or "problem".
        found: one line of text for people.
        fixes: commands or advice, each on its own enough; none where all is well.
        ranks: ranks whose machine or process has this finding.
    """

    subject: str
    level: str
    found: str
    fixes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the finding as `--json` prints it."""
        return {**asdict(self), "fixes": list(self.fixes), "ranks": list(self.ranks)}


def to_tell(findings: Iterable[Finding]) -> list[list[Any]]:
    """Return the warnings and problems that one rank sends to the others, as JSON values."""
    wrong = [one for one in findings if one.level != OK]
    return [
        [one.subject, one.level, one.found[:_LONGEST], [fix[:_LONGEST] for fix in one.fixes]]
        for one in wrong[:_MOST]
    ]


def merged(told: Sequence[Sequence[Sequence[Any]]]) -> list[Finding]:
    """Combine equal findings of several ranks into one; warnings first, problems last.

    Args:
        told: for each rank in order, the result of `to_tell`.
    """
    seen: dict[tuple[str, str, str, tuple[str, ...]], list[int]] = {}
    for rank, findings in enumerate(told):
        for subject, level, text, fixes in findings:
            seen.setdefault((subject, level, text, tuple(fixes)), []).append(rank)
    found = []
    for (subject, level, text, fixes), ranks in seen.items():
        found.append(Finding(subject, level, text, fixes, tuple(ranks)))
    return worst_last(found)


def worst_last(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level, problems last; keep the order within a level."""
    return sorted(findings, key=lambda one: _ORDER.index(one.level))


def of_rank(findings: Iterable[Finding], rank: int) -> list[Finding]:
    """Return copies of the findings that belong to one rank."""
    return [replace(one, ranks=(rank,)) for one in findings]


def spans(numbers: Sequence[int]) -> str:
    """Format rank numbers as `rank 3` or `ranks 0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def plain(value: object) -> str:
    """Return a value as one line of text without control characters, for a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(value)).strip()
