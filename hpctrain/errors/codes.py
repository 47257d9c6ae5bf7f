"""Table of the codes of errors, which `hpctrain explain CODE` and docs/errors.md show.

A code never changes its meaning, and a code that is no longer used is not given to another error.
"""

from dataclasses import dataclass

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
    causes: tuple[str, ...]
    fix: str


CODES: dict[str, Code] = {}
