"""Output of the report: text in parts during the checks, or one JSON object at the end."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from hpctrain.cluster.world import World
from hpctrain.tools.doctor import formatting
from hpctrain.tools.doctor.findings import PROBLEM, Finding
from hpctrain.tools.doctor.machine import Machine
from hpctrain.tools.doctor.rank_comparison import Row

__all__ = ["Report"]


class Report:
    """Report of the checks; rank 0 prints it, the other ranks print nothing.

    Args:
        own: findings and facts about this machine.
        world: world, with the rank of this process.
        as_json: whether to print one JSON object in place of text.
    """

    def __init__(self, own: Machine, world: World, as_json: bool) -> None:
        self._own = own
        self._hosts: Sequence[str] = [own.facts["host"]] * world.world_size
        self._silent = world.rank != 0
        self._as_json = as_json
        self._findings: list[Finding] = []
        self._rows: Sequence[Row] = ()
        self._sums: dict[str, Any] | None = None
        self._pairs: list[dict[str, Any]] = []

    def machines(self, findings: Sequence[Finding], hosts: Sequence[str] = ()) -> None:
        """Add and print the findings of the machines; must be called once, before the rest.

        Args:
            findings: all findings of this machine; the warnings and problems of the others.
            hosts: host name of each rank; empty where unknown.
        """
        self._findings += findings
        self._hosts = hosts or self._hosts
        self._print(
            formatting.machine(self._own.facts["host"], findings, self._own.facts["environment"]),
            formatting.remarks(findings, self._hosts),
        )

    def table(self, rows: Sequence[Row], findings: Sequence[Finding]) -> None:
        """Add and print the table of all ranks and the findings on their differences."""
        self._rows = rows
        self._findings += findings
        lines = formatting.passed(findings)
        self._print("", formatting.table(rows), *lines, formatting.remarks(findings, self._hosts))

    def exchanged(
        self, sums: dict[str, Any], pairs: list[dict[str, Any]], findings: Sequence[Finding]
    ) -> None:
        """Add and print the results of the sums and of the transfers between hosts."""
        self._sums, self._pairs = sums, pairs
        self._print("", formatting.exchanged(sums, pairs))
        self.add(findings)

    def add(self, findings: Sequence[Finding]) -> None:
        """Add and print more findings."""
        self._findings += findings
        self._print(formatting.remarks(findings, self._hosts))

    def end(self) -> int:
        """Print the end of the report; return 1 where rank 0 has a problem, else 0."""
        self._print("", formatting.closing(self._findings))
        if self._as_json and not self._silent:
            report = {
                "machine": self._own.facts,
                "findings": [finding.as_json() for finding in self._findings],
                "ranks": [row.as_json() for row in self._rows],
                "all_reduce": self._sums,
                "pairs": self._pairs,
            }
            sys.stdout.write(json.dumps(report) + "\n")
        return int(not self._silent and any(f.level == PROBLEM for f in self._findings))

    def _print(self, *parts: str) -> None:
        """Print text at once, because a later check may end this process."""
        if not self._silent and not self._as_json and any(parts):
            sys.stdout.write("\n".join(parts).rstrip("\n") + "\n")
            sys.stdout.flush()
