"""Words of bash: their text, and the parts that the shell would replace."""

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
        text: text without quotes; an expansion as in the script.
        expands: whether the shell replaces it: $NAME, ${…}, $(…), `…`.
        quoted: whether it is in quotes, so that it stays one word.
    """

    text: str
    expands: bool = False
    quoted: bool = False

    @property
    def variable(self) -> str:
        """Name of the variable if the piece is a plain variable; else empty."""
        match = _PLAIN_VARIABLE.match(self.text) if self.expands else None
        return (match[1] or match[2]) if match else ""

    @property
    def array(self) -> str:
        """Name of the array if the piece is all its elements, ${NAME[@]}; else empty."""
        match = _ARRAY.match(self.text) if self.expands else None
        return match[1] if match else ""

    @property
    def mentions(self) -> str:
        """Name of the variable in an expansion of any kind, such as ${NAME%/*}; else empty."""
        match = _NAME.match(self.text) if self.expands else None
        return match[1] if match else ""


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        line: line number of its beginning, from 1.
        pieces: pieces in their order.
        elements: elements of the array in an assignment `name=(…)`; else None.
    """

    line: int
    pieces: tuple[Piece, ...]
    elements: tuple[Word, ...] | None = None

    @property
    def text(self) -> str:
        """Text without quotes; expansions as in the script."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def literal(self) -> bool:
        """Whether the word contains nothing that the shell replaces."""
        return not any(piece.expands for piece in self.pieces) and self.elements is None

    @property
    def bare(self) -> str:
        """Text if nothing is quoted or replaced, as in keywords; else empty."""
        plain = not any(piece.quoted or piece.expands for piece in self.pieces)
        return self.text if plain else ""

    def after(self, length: int) -> Word:
        """Return the word without its first `length` characters, which are in the first piece."""
        first, *others = self.pieces
        rest = Piece(first.text[length:], first.expands, first.quoted)
        return Word(self.line, (rest, *others) if rest.text else tuple(others), self.elements)
