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
    "to_send",
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
        fixes: commands or advice; each one alone is enough. Empty for level ok.
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


def to_send(findings: Iterable[Finding]) -> list[list[Any]]:
    """Return the warnings and problems that one rank sends to the others, as JSON values."""
    wrong = [finding for finding in findings if finding.level != OK]
    return [
        [f.subject, f.level, f.found[:_LONGEST], [fix[:_LONGEST] for fix in f.fixes]]
        for f in wrong[:_MOST]
    ]


def merged(sent: Sequence[Sequence[Sequence[Any]]]) -> list[Finding]:
    """Combine equal findings of several ranks into one; warnings first, problems last.

    Args:
        sent: for each rank in order, the result of `to_send`.
    """
    ranks_of: dict[tuple[str, str, str, tuple[str, ...]], list[int]] = {}
    for rank, findings in enumerate(sent):
        for subject, level, text, fixes in findings:
            ranks_of.setdefault((subject, level, text, tuple(fixes)), []).append(rank)
    found = []
    for (subject, level, text, fixes), ranks in ranks_of.items():
        found.append(Finding(subject, level, text, fixes, tuple(ranks)))
    return worst_last(found)


def worst_last(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level, problems last; keep the order within a level."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.level))


def of_rank(findings: Iterable[Finding], rank: int) -> list[Finding]:
    """Return copies of the findings that belong to one rank."""
    return [replace(finding, ranks=(rank,)) for finding in findings]
