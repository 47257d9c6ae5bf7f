"""Findings of the checks, and the report of them: text, or one JSON object at the end."""

import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from hpctrain.cluster.texts import listed, printable, ranks_text
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError

__all__ = ["Finding", "Report", "merged", "problem", "text", "to_send", "warning"]

WARNING, PROBLEM = "warning", "problem"
# Facts of every machine; the others are what the checks found, where nothing is wrong.
_ALWAYS = ("host", "system", "launcher", "python")
_COLUMNS, _SUBJECT = 100, 18
_MAX_HOSTS_SHOWN = 64  # --json has all
# The rendezvous sends the findings of all ranks, up to thousands, in one message.
_MAX_SENT = 400


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a check found wrong, and how to fix it.

    Attributes:
        subject: subject of the check, such as "torch".
        level: "warning" or "problem".
        found: one line of text for people.
        expected: what was expected.
        fixes: commands or advice; each one alone is enough.
        code: code of the error with which a training refuses this; empty without one.
        ranks: ranks whose machine or process has this finding; empty if the text names them.
    """

    subject: str
    level: str
    found: str
    expected: str
    fixes: tuple[str, ...]
    code: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, subject: str, cause: HpctrainError, stops: bool = True) -> Self:
        """Return the finding with the texts of an error.

        Args:
            subject: subject of the check.
            cause: the error.
            stops: whether it is a problem, else a warning.
        """
        level = PROBLEM if stops else WARNING
        return cls(subject, level, printable(cause.found), cause.expected, cause.fixes, cause.code)


def warning(
    subject: str, found: str, expected: str, *fixes: str, ranks: Sequence[int] = ()
) -> Finding:
    """Return a finding of level warning."""
    return Finding(subject, WARNING, found, expected, fixes, ranks=tuple(ranks))


def problem(
    subject: str, found: str, expected: str, *fixes: str, ranks: Sequence[int] = ()
) -> Finding:
    """Return a finding of level problem."""
    return Finding(subject, PROBLEM, found, expected, fixes, ranks=tuple(ranks))


def to_send(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the findings that one rank sends to the others, as JSON values."""
    return [asdict(replace(finding, found=finding.found[:_MAX_SENT])) for finding in findings]


def merged(sent: Sequence[Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Combine equal findings of several ranks into one.

    Args:
        sent: for each rank in order, the result of `to_send`.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(sent):
        for values in findings:
            finding = Finding(**{**values, "fixes": tuple(values["fixes"]), "ranks": ()})
            ranks_of.setdefault(finding, []).append(rank)
    return [replace(one, ranks=tuple(ranks)) for one, ranks in ranks_of.items()]


def _worst_last(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level, problems last; keep the order within a level."""
    return sorted(findings, key=lambda finding: finding.level == PROBLEM)


class Report:
    """Report of the checks; rank 0 prints it, the other ranks print nothing.

    Args:
        facts: facts about this machine.
        world: world, with the rank of this process.
        as_json: whether to print one JSON object instead of text.
    """

    def __init__(self, facts: Mapping[str, str], world: World, as_json: bool) -> None:
        self._facts = facts
        self._hosts: Sequence[str] = [facts["host"]] * world.world_size
        self._silent = world.rank != 0
        self._as_json = as_json
        self._findings: list[Finding] = []
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._sums: dict[str, Any] | None = None

    def machines(self, findings: Sequence[Finding], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add and print the facts of this machine, the ranks, and the findings of all machines.

        Args:
            findings: findings of this machine and of those of the other ranks.
            rows: host and device of each rank; empty where unknown.
        """
        self._rows = rows
        self._print(*(_line(name, fact) for name, fact in self._facts.items()))
        if rows:
            self._hosts = [row["host"] for row in rows]
            self._print(_line("ranks", f"{len(rows)} on {_count(len(set(self._hosts)))}"))
            for host in list(dict.fromkeys(self._hosts))[:_MAX_HOSTS_SHOWN]:
                there = [row for row in rows if row["host"] == host]
                devices = listed(sorted({printable(row["device"]) for row in there}))
                ranks = ranks_text([row["rank"] for row in there])
                self._print(_line(f"  {host}", f"{ranks}: {devices}"))
        self.add(_worst_last(findings))

    def sums(self, transport: str, wrong: Sequence[int]) -> None:
        """Add and print the result of the test sums.

        Args:
            transport: library that carried the data.
            wrong: ranks where a sum was not exact.
        """
        self._sums = {"transport": transport, "correct": not wrong, "wrong_at_ranks": wrong}
        if wrong:
            expected = "exact sums, or training computes wrong gradients"
            fix = "srun --exclude=HOSTS, and report the hosts of these ranks to the administrators"
            found = f"a wrong sum over {transport}"
            self.add([problem("all-reduce", found, expected, fix, ranks=wrong)])
        else:
            self._print(_line("all-reduce", f"exact sums at all ranks over {transport}"))

    def add(self, findings: Sequence[Finding]) -> None:
        """Add and print more findings."""
        self._findings += findings
        self._print(*(text(finding, self._hosts) for finding in findings))

    def end(self) -> int:
        """Print the end of the report; return 1 where rank 0 has a problem, else 0."""
        self._print("", _closing(self._findings))
        if self._as_json and not self._silent:
            checks = {name: one for name, one in self._facts.items() if name not in _ALWAYS}
            report = {
                "machine": {**{name: self._facts[name] for name in _ALWAYS}, "checks": checks},
                "findings": [{**asdict(one), "code": one.code or None} for one in self._findings],
                "ranks": self._rows,
                "all_reduce": self._sums,
            }
            sys.stdout.write(json.dumps(report) + "\n")
        return int(not self._silent and any(f.level == PROBLEM for f in self._findings))

    def _print(self, *lines: str) -> None:
        """Print text at once, because a later check may end this process."""
        if not self._silent and not self._as_json:
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()


def text(finding: Finding, hosts: Sequence[str]) -> str:
    """Return a finding as text: one line, and below it what to type.

    Args:
        finding: the finding.
        hosts: host name of each rank, in the order of ranks.
    """
    everywhere = len(finding.ranks) in (0, len(hosts))
    where = "" if everywhere else f" ({ranks_text(finding.ranks, hosts)})"
    label = "PROBLEM" if finding.level == PROBLEM else finding.level
    # Do not wrap a command that the user copies.
    return "\n".join(
        [
            _line(label, f"{finding.subject}{where}: {finding.found}"),
            f"    expected: {finding.expected}",
            *(f"    {'or: ' if n else 'fix:'}      {fix}" for n, fix in enumerate(finding.fixes)),
            *([f"    more:     hpctrain explain {finding.code}"] if finding.code else []),
        ]
    )


def _line(subject: str, words: str) -> str:
    return textwrap.fill(
        words,
        _COLUMNS,
        initial_indent=f"  {subject:<{_SUBJECT - 1}} ",
        subsequent_indent=" " * (_SUBJECT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(hosts: int) -> str:
    return f"{hosts} host{'s' if hosts > 1 else ''}"


def _closing(findings: Sequence[Finding]) -> str:
    """Return the last line: the numbers of problems and warnings."""
    parts = []
    for level in (PROBLEM, WARNING):
        subjects = [finding.subject for finding in findings if finding.level == level]
        if subjects:
            plural = "s" if len(subjects) > 1 else ""
            parts.append(f"{len(subjects)} {level}{plural} ({', '.join(dict.fromkeys(subjects))})")
    return "; ".join(parts) or "no problems, no warnings"
