"""Words of bash: what stands in them, and what of it the shell would replace."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Piece", "Word"]

_PLAIN_VARIABLE = re.compile(r"\$(?:(\w+|[@*#?$!-])|\{(\w+|[@*])\})\Z")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}\Z")
_NAME = re.compile(r"\$\{?[!#]?(\w+|[@*#?$!-])")


@dataclass(frozen=True)
class Piece:
    """A part of a word.

    Attributes:
        text: without quotes; an expansion as it was written.
        expands: whether the shell replaces it: $NAME, ${…}, $(…), `…`.
        quoted: whether it stood in quotes, so that it stays one word.
    """

    text: str
    expands: bool = False
    quoted: bool = False

    @property
    def variable(self) -> str:
        """The variable that it is, where it is nothing but that; else empty."""
        match = _PLAIN_VARIABLE.match(self.text) if self.expands else None
        return (match[1] or match[2]) if match else ""

    @property
    def array(self) -> str:
        """The array whose elements it is: ${NAME[@]}; else empty."""
        match = _ARRAY.match(self.text) if self.expands else None
        return match[1] if match else ""

    @property
    def mentions(self) -> str:
        """The variable of an expansion of any kind, such as ${NAME%/*}; else empty."""
        match = _NAME.match(self.text) if self.expands else None
        return match[1] if match else ""


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        line: where it begins, from 1.
        pieces: in their order.
        elements: of an array, where it is the assignment `name=(…)`.
    """

    line: int
    pieces: tuple[Piece, ...]
    elements: tuple[Word, ...] | None = None

    @property
    def text(self) -> str:
        """Without quotes; expansions as they were written."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def literal(self) -> bool:
        """Whether the shell replaces nothing in it."""
        return not any(piece.expands for piece in self.pieces) and self.elements is None

    @property
    def bare(self) -> str:
        """The text where nothing is quoted or replaced, as keywords have to be; else empty."""
        plain = not any(piece.quoted or piece.expands for piece in self.pieces)
        return self.text if plain else ""

    def after(self, length: int) -> Word:
        """What is left without so many characters, which are in the first piece."""
        first, *others = self.pieces
        rest = Piece(first.text[length:], first.expands, first.quoted)
        return Word(self.line, (rest, *others) if rest.text else tuple(others), self.elements)
