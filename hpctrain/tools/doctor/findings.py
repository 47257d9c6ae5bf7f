"""Findings of the checks: what was found, what was expected, and what to type."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from hpctrain.cluster.texts import printable
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.rendezvous.consistency import Difference

__all__ = ["OK", "PROBLEM", "WARNING", "Finding", "merged", "to_send", "worst_last"]

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_ORDER = (OK, WARNING, PROBLEM)
# The rendezvous sends the findings of all ranks, up to thousands, in one message.
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: subject of the check, such as "torch".
        level: "ok", "warning" or "problem".
        found: one line of text for people.
        expected: what was expected; empty for level ok.
        fixes: commands or advice; each one alone is enough. Empty for level ok.
        code: code of the error with which a training refuses this; empty without one.
        ranks: ranks whose machine or process has this finding; empty if the text names them.
    """

    subject: str
    level: str
    found: str
    expected: str = ""
    fixes: tuple[str, ...] = ()
    code: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, subject: str, cause: "HpctrainError | Difference", level: str = PROBLEM) -> Self:
        """Return the finding with the texts of an error, or of a difference between ranks."""
        return cls(subject, level, printable(cause.found), cause.expected, cause.fixes, cause.code)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as `--json` prints it."""
        return {**asdict(self), "code": self.code or None}


def to_send(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the warnings and problems that one rank sends to the others, as JSON values."""
    wrong = [finding for finding in findings if finding.level != OK]
    return [asdict(replace(finding, found=finding.found[:_LONGEST])) for finding in wrong]


def merged(sent: Sequence[Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Combine equal findings of several ranks into one; warnings first, problems last.

    Args:
        sent: for each rank in order, the result of `to_send`.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(sent):
        for values in findings:
            finding = Finding(**{**values, "fixes": tuple(values["fixes"]), "ranks": ()})
            ranks_of.setdefault(finding, []).append(rank)
    return worst_last(replace(one, ranks=tuple(ranks)) for one, ranks in ranks_of.items())


def worst_last(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level, problems last; keep the order within a level."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.level))
