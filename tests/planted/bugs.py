"""Planted bugs: the table in bugs.toml, and the checks of its entries."""

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
        promise: the promise that it breaks, in one line.
        file: relative to the project.
        old: a text that the file has exactly once.
        new: what replaces it.
        tests: those that should fail, as pytest names them: FILE::TEST or FILE::TEST[PARAMETERS].
        tier: "default", or "all" if only slow tests fail.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    tier: str = "default"

    def plant(self, text: str) -> str:
        """Return the text of the file with the bug planted."""
        return text.replace(self.old, self.new)


def load() -> list[Bug]:
    """Return all bugs, in the order of the table."""
    table = tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())
    return [Bug(name, **fields) for name, fields in table.items()]


def mistakes(bug: Bug) -> list[str]:
    """Return the mistakes in an entry of the table, without running anything."""
    text = (TOP / bug.file).read_text()
    found = []
    if text.count(bug.old) != 1:
        found.append(f"{bug.file} has its old text {text.count(bug.old)} times, not once")
    if bug.file.endswith(".py"):
        try:
            compile(bug.plant(text), bug.file, "exec")
        except SyntaxError as error:
            found.append(f"{bug.file} is no Python any more: {error}")
    return found
