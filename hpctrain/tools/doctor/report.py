"""Findings of the checks, and the report of them: text, or one JSON object at the end."""

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from hpctrain.cluster.texts import listed, printable, ranks_text
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, codes

# Facts of every machine; the others are what the checks found, where nothing is wrong.
_ALWAYS = ("host", "system", "launcher", "python")
_MAX_HOSTS_SHOWN = 64  # --json has all
TEXTS = Path(__file__).with_name("findings.toml")


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
    def of(cls, subject: str, cause: HpctrainError | codes.Message, level: str = "problem") -> Self:
        """Return the finding with the texts of an error."""
        fixes = tuple(cause.fixes)
        return cls(subject, level, printable(cause.found), cause.expected, fixes, cause.code)


def finding(name: str, ranks: Sequence[int] = (), /, **values: object) -> Finding:
    """Return a finding with a text of `findings.toml`.

    Args:
        name: subject and key, such as "torch.missing".
        ranks: ranks that have the finding.
        values: values of the placeholders.
    """
    subject, _, key = name.partition(".")
    texts = tomllib.loads(TEXTS.read_text(encoding="utf-8"))[subject][key]
    level = texts.pop("level")
    message = codes.filled(codes.Message("", **texts), values)
    return replace(Finding.of(subject.format(**values), message, level), ranks=tuple(ranks))


def merged(sent: Sequence[Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Combine equal findings of several ranks into one.

    Args:
        sent: findings of each rank as JSON values, in the order of ranks.
    """
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(sent):
        for values in findings:
            one = Finding(**{**values, "fixes": tuple(values["fixes"]), "ranks": ()})
            ranks.setdefault(one, []).append(rank)
    return [replace(one, ranks=tuple(where)) for one, where in ranks.items()]


class Report:
    """Report of the checks; rank 0 prints it, the other ranks print nothing.

    Args:
        facts: facts about this machine.
        world: world, with the rank of this process.
        as_json: whether to print one JSON object instead of text.
    """

    def __init__(self, facts: Mapping[str, str], world: World, as_json: bool) -> None:
        self._facts, self._as_json, self._silent = facts, as_json, world.rank != 0
        self._hosts: Sequence[str] = [facts["host"]] * world.world_size
        self._findings: list[Finding] = []
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._sums: dict[str, Any] | None = None

    def machines(self, findings: Iterable[Finding], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add and print the facts of this machine, the ranks, and the findings of all machines.

        Args:
            findings: findings of this machine and of those of the other ranks.
            rows: host and device of each rank; empty if the ranks did not meet.
        """
        self._rows = rows
        self._print(*(_line(name, fact) for name, fact in self._facts.items()))
        if len(rows) > 1:
            self._hosts = [row["host"] for row in rows]
            hosts = list(dict.fromkeys(self._hosts))
            self._print(_line("ranks", f"{len(rows)} (hosts: {len(hosts)})"))
            for host in hosts[:_MAX_HOSTS_SHOWN]:
                there = [row for row in rows if row["host"] == host]
                devices = listed(sorted({row["device"] for row in there}))
                ranks = ranks_text([row["rank"] for row in there])
                self._print(_line(f"  {host}", f"{ranks}: {devices}"))
        self.add(sorted(findings, key=lambda one: one.level, reverse=True))  # problems last

    def sums(self, transport: str, wrong: Sequence[int]) -> None:
        """Add and print the result of the test sums.

        Args:
            transport: library that carried the data.
            wrong: ranks where a sum was not exact.
        """
        self._sums = {"transport": transport, "correct": not wrong, "wrong_at_ranks": wrong}
        if wrong:
            self.add([finding("all-reduce.wrong", wrong, transport=transport)])
        else:
            self._print(_line("all-reduce", f"exact sums at all ranks over {transport}"))

    def add(self, findings: Iterable[Finding]) -> None:
        """Add and print more findings."""
        for one in findings:
            self._findings.append(one)
            where = f" ({ranks_text(one.ranks, self._hosts)})"
            if len(one.ranks) in (0, len(self._hosts)):
                where = ""
            self._print(_line(one.level.upper(), f"{one.subject}{where}: {one.found}"))
            # An error prints the rest in the same form.
            error = HpctrainError.of_text(one.code, "", one.expected, *one.fixes)
            self._print(*(f"  {line}" for line in str(error).splitlines()[1:]))

    def end(self) -> int:
        """Print the end of the report; return 1 where rank 0 has a problem, else 0."""
        levels = [one.level for one in self._findings]
        problems, warnings = map(levels.count, ("problem", "warning"))
        self._print("", f"problems: {problems}, warnings: {warnings}")
        if self._as_json and not self._silent:
            checks = {name: one for name, one in self._facts.items() if name not in _ALWAYS}
            report = {
                "machine": {**{name: self._facts[name] for name in _ALWAYS}, "checks": checks},
                "findings": [{**asdict(one), "code": one.code or None} for one in self._findings],
                "ranks": self._rows,
                "all_reduce": self._sums,
            }
            sys.stdout.write(json.dumps(report) + "\n")
        return int(not self._silent and problems > 0)

    def _print(self, *lines: str) -> None:
        """Print text at once, because a later check may end this process."""
        if not self._silent and not self._as_json:
            sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
            sys.stdout.flush()


def _line(subject: str, words: str) -> str:
    return f"  {subject:<17} {words}"
