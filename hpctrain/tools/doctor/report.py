"""Output of the report: text in parts during the checks, or one JSON object at the end."""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.cluster.texts import printable, ranks_text
from hpctrain.cluster.world import World
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding

__all__ = ["Report", "closing", "table_text", "text"]

_COLUMNS, _SUBJECT = 100, 18
# From this rank on, only --json has a row.
_MOST_ROWS = 64


class Report:
    """Report of the checks; rank 0 prints it, the other ranks print nothing.

    Args:
        facts: facts about this machine.
        world: world, with the rank of this process.
        as_json: whether to print one JSON object in place of text.
    """

    def __init__(self, facts: Mapping[str, Any], world: World, as_json: bool) -> None:
        self._facts = facts
        self._hosts: Sequence[str] = [facts["host"]] * world.world_size
        self._silent = world.rank != 0
        self._as_json = as_json
        self._findings: list[Finding] = []
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._sums: dict[str, Any] | None = None

    def machines(self, findings: Sequence[Finding], hosts: Sequence[str] = ()) -> None:
        """Add and print the findings of the machines; must be called once, before the rest.

        Args:
            findings: all findings of this machine; the warnings and problems of the others.
            hosts: host name of each rank; empty where unknown.
        """
        self._hosts = hosts or self._hosts
        facts = self._facts
        self._print(f"this machine: {facts['host']}, {facts['system']}")
        self._print(_line("launcher", facts["launcher"]))
        shown = " ".join(f"{name}={value}" for name, value in facts["environment"].items())
        if shown:
            self._print(_line("variables", shown))
        self.add(findings)

    def table(self, rows: Sequence[Mapping[str, Any]], findings: Sequence[Finding]) -> None:
        """Add and print the table of all ranks and the findings on their differences."""
        self._rows = rows
        self._print("", table_text(rows))
        self.add(findings)

    def sums(self, transport: str, wrong: Sequence[int], speeds: Mapping[int, float]) -> None:
        """Add and print the results of the sums.

        Args:
            transport: library that carried the data.
            wrong: ranks where a sum was not exact.
            speeds: bus bandwidth in GB/s at the slowest rank, by size in bytes.
        """
        self._sums = {
            "transport": transport,
            "correct": not wrong,
            "wrong_at_ranks": wrong,
            "bus_bandwidth": [
                {"bytes": size, "gigabytes_per_second": speed} for size, speed in speeds.items()
            ],
        }
        self._print("")
        for size, speed in speeds.items():
            self._print(_line(f"sum of {size // 10**6} MB", f"{speed:.3g} GB/s bus bandwidth"))

    def add(self, findings: Sequence[Finding]) -> None:
        """Add and print more findings."""
        self._findings += findings
        for finding in findings:
            self._print(text(finding, self._hosts))

    def end(self) -> int:
        """Print the end of the report; return 1 where rank 0 has a problem, else 0."""
        self._print("", closing(self._findings))
        if self._as_json and not self._silent:
            report = {
                "machine": self._facts,
                "findings": [finding.as_json() for finding in self._findings],
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


def _line(subject: str, words: str) -> str:
    return textwrap.fill(
        words,
        _COLUMNS,
        initial_indent=f"  {subject:<{_SUBJECT}}",
        subsequent_indent=" " * (_SUBJECT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def text(finding: Finding, hosts: Sequence[str]) -> str:
    """Return a finding as text: one line, and below it what to type.

    Args:
        finding: finding of any level.
        hosts: host name of each rank, in the order of ranks.
    """
    if finding.level == OK:
        return _line(finding.subject, finding.found)
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


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each rank; values that all ranks share are in a line above."""
    columns = {
        name: ["none" if row[name] is None else printable(row[name]) for row in rows]
        for name in rows[0]
    }
    varying = [name for name in columns if name in ("rank", "host") or len(set(columns[name])) > 1]
    same = [f"{name} {columns[name][0]}" for name in columns if name not in varying]
    cells = [varying, *zip(*(columns[name][:_MOST_ROWS] for name in varying), strict=True)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    hosts = len(set(columns["host"]))
    lines = [f"{len(rows)} ranks on {hosts} host{'s' if hosts > 1 else ''}"]
    lines.append(_line("same values", ", ".join(same)))
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append(f"  {'  '.join(padded)}".rstrip())
    if len(rows) > _MOST_ROWS:
        lines.append(f"  … and {len(rows) - _MOST_ROWS} more; --json has all")
    return "\n".join(lines)


def closing(findings: Sequence[Finding]) -> str:
    """Return the last line: the numbers of problems and warnings."""
    parts = []
    for level in (PROBLEM, WARNING):
        subjects = [finding.subject for finding in findings if finding.level == level]
        if subjects:
            plural = "s" if len(subjects) > 1 else ""
            parts.append(f"{len(subjects)} {level}{plural} ({', '.join(dict.fromkeys(subjects))})")
    return "; ".join(parts) or "no problems, no warnings"
