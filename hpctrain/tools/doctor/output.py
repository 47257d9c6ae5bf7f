"""What is told: text in parts as they come, or one JSON object at the end."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from hpctrain.cluster.world import World
from hpctrain.tools.doctor import formatting
from hpctrain.tools.doctor.findings import PROBLEM, Finding
from hpctrain.tools.doctor.machine import Machine
from hpctrain.tools.doctor.ranks import Row

__all__ = ["Report"]


class Report:
    """Rank 0's; that of another rank keeps silent.

    Args:
        own: this machine.
        world: this rank.
        as_json: for programs.
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

    def tell(self, findings: Sequence[Finding], hosts: Sequence[str] = ()) -> None:
        """This machine, and what is not well with it and others; once, and before the rest.

        Args:
            findings: all of this machine, and of others those that are not well.
            hosts: by rank, the name of its host, where that is known.
        """
        self._findings += findings
        self._hosts = hosts or self._hosts
        self._say(
            formatting.machine(self._own.facts["host"], findings, self._own.facts["environment"]),
            formatting.remarks(findings, self._hosts),
        )

    def table(self, rows: Sequence[Row], findings: Sequence[Finding]) -> None:
        """All ranks, and in what they differ."""
        self._rows = rows
        self._findings += findings
        lines = formatting.well(findings)
        self._say("", formatting.table(rows), *lines, formatting.remarks(findings, self._hosts))

    def exchanged(
        self, sums: dict[str, Any], pairs: list[dict[str, Any]], findings: Sequence[Finding]
    ) -> None:
        """Sums, and ways between hosts."""
        self._sums, self._pairs = sums, pairs
        self._say("", formatting.exchanged(sums, pairs))
        self.add(findings)

    def add(self, findings: Sequence[Finding]) -> None:
        """More findings."""
        self._findings += findings
        self._say(formatting.remarks(findings, self._hosts))

    def end(self) -> int:
        """The last word; an exit code."""
        self._say("", formatting.closing(self._findings))
        if self._as_json and not self._silent:
            told = {
                "machine": self._own.facts,
                "findings": [one.as_json() for one in self._findings],
                "ranks": [row.as_json() for row in self._rows],
                "all_reduce": self._sums,
                "pairs": self._pairs,
            }
            sys.stdout.write(json.dumps(told) + "\n")
        return int(not self._silent and any(one.level == PROBLEM for one in self._findings))

    def _say(self, *parts: str) -> None:
        """To people, at once: what follows may end this process."""
        if not self._silent and not self._as_json and any(parts):
            sys.stdout.write("\n".join(parts).rstrip("\n") + "\n")
            sys.stdout.flush()
