"""Table of the codes of errors, which `hpctrain explain CODE` and docs/errors.md show."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CODES", "Code"]


@dataclass(frozen=True, slots=True)
class Code:
    """Entry of an error's code.

    Attributes:
        meaning: what went wrong, in one sentence.
        causes: usual causes, the most frequent first.
        fix: what to do, in one or two sentences.
    """

    meaning: str
    causes: Sequence[str]
    fix: str


_TABLE = Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")

CODES = {code: Code(**entry) for code, entry in tomllib.loads(_TABLE).items()}
