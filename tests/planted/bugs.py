"""Planted bugs: the table in bugs.toml, and what each entry has to be."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TOP", "Bug", "load", "mistakes"]

TOP = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Bug:
    """A small change to the product that breaks a promise.

    Attributes:
        name: of the bug.
        promise: what it breaks, in one line.
        file: relative to the project.
        old: a text that the file has exactly once.
        new: what replaces it.
        tests: those that should notice, as pytest names them: FILE::TEST or FILE::TEST[PARAMETERS].
        tier: "default", or "all" where only slow tests notice.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    tier: str = "default"

    def plant(self, text: str) -> str:
        """The file's text with the bug in it."""
        return text.replace(self.old, self.new)


def load() -> list[Bug]:
    """All bugs, in the order of the table."""
    table = tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())
    return [Bug(name, **fields) for name, fields in table.items()]


def mistakes(bug: Bug) -> list[str]:
    """What is wrong with an entry of the table; nothing is run for it."""
    text = (TOP / bug.file).read_text()
    wrong = []
    if text.count(bug.old) != 1:
        wrong.append(f"{bug.file} has its old text {text.count(bug.old)} times, not once")
    if bug.file.endswith(".py"):
        try:
            compile(bug.plant(text), bug.file, "exec")
        except SyntaxError as error:
            wrong.append(f"{bug.file} is no Python any more: {error}")
    return wrong
