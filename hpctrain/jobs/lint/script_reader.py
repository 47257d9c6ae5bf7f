"""Reader of bash words, character by character: quotes, escapes, expansions."""

import bisect
import re

from hpctrain.jobs.lint.words import Piece, Word

__all__ = ["ASSIGNMENT", "META", "WordReader", "line_starts"]

#: What ends a word.
META = frozenset(" \t\n;&|<>()")
#: What a word begins with that assigns: NAME=, NAME+= or NAME[…]=.
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_ORDINARY = re.compile(r"[^ \t\n;&|<>()'\"$`\\]+")
_IN_DOUBLE_QUOTES = re.compile(r'[^"$`\\]+')
_ANSI_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'?", re.DOTALL)
_IN_BACKTICKS = re.compile(r"`((?:[^`\\]|\\.)*)`?", re.DOTALL)
_BRACES = re.compile(r"\\.|\$?\{|\}", re.DOTALL)
_BRACKETS = re.compile(r"[()]")
_SIMPLE_VARIABLE = re.compile(r"\w+|[@*#?$!-]")


def line_starts(text: str) -> list[int]:
    """Return the positions at which the lines of a text begin."""
    return [0, *(match.end() for match in re.finditer("\n", text))]


class WordReader:
    """Reader of the words of a text, from a position on.

    Args:
        text: text of a script, or a part of it.
        starts: positions at which its lines begin.
        first_line: number of its first line.
        at: position at which the reader starts.
    """

    def __init__(self, text: str, starts: list[int], first_line: int, at: int) -> None:
        self.text, self.starts, self.first_line, self.at = text, starts, first_line, at

    def nested(self, text: str, starts: list[int], first_line: int, at: int) -> int:
        """Read the commands of $(…) from a position, and return the position after it."""
        raise NotImplementedError

    def comment(self) -> None:
        """Read a comment."""
        raise NotImplementedError

    def line(self, at: int) -> int:
        """Return the line number of a position."""
        return bisect.bisect_right(self.starts, at) - 1 + self.first_line

    def peek(self, length: int = 1) -> str:
        """Return the next characters."""
        return self.text[self.at : self.at + length]

    def word(self, may_be_array: bool = True) -> Word:
        """Read and return the word that begins here, with at least one character."""
        start = self.at
        pieces: list[Piece] = []
        elements: tuple[Word, ...] | None = None
        while self.at < len(self.text):
            char = self.text[self.at]
            if (
                char == "("
                and may_be_array
                and len(pieces) == 1
                and ASSIGNMENT.fullmatch(pieces[0].text)
            ):
                elements = self._elements()
                break
            if char in META and not (self.at == start and self.peek(2) in ("<(", ">(")):
                break
            pieces += self._pieces(char)
        return Word(self.line(start), _joined(pieces), elements)

    def _elements(self) -> tuple[Word, ...]:
        """Read the words of an array, up to its closing bracket."""
        self.at += 1
        words = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                break
            if char == "#":
                self.comment()
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif char in META and self.peek(2) not in ("<(", ">("):
                self.at += 1
            else:
                words.append(self.word(may_be_array=False))
        return tuple(words)

    def _pieces(self, char: str) -> list[Piece]:
        """Read the next part of a word."""
        if char == "'":
            return [Piece(self._until("'", 1), quoted=True)]
        if char == '"':
            return self._double_quoted()
        if char in "$`<>":
            return self._expansion(quoted=False)
        if char == "\\":
            self.at += 2
            escaped = self.text[self.at - 1 : self.at]
            return [] if escaped == "\n" else [Piece(escaped, quoted=True)]
        return [Piece(self._match(_ORDINARY)[0])]

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Match a pattern that always matches here, and move the position after the match."""
        match = pattern.match(self.text, self.at)
        assert match
        self.at = match.end()
        return match

    def _until(self, closed_by: str, skipped: int) -> str:
        """Read the text before a character, and move after it or to the end of the text."""
        start = self.at + skipped
        end = self.text.find(closed_by, start)
        end = len(self.text) if end < 0 else end
        self.at = min(end + 1, len(self.text))
        return self.text[start:end]

    def _double_quoted(self) -> list[Piece]:
        self.at += 1
        pieces = [Piece("", quoted=True)]
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char in "$`":
                pieces += self._expansion(quoted=True)
            elif char == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                character = {"\n": ""}.get(
                    escaped, escaped if escaped in '$`"\\' else "\\" + escaped
                )
                pieces.append(Piece(character, quoted=True))
            else:
                pieces.append(Piece(self._match(_IN_DOUBLE_QUOTES)[0], quoted=True))
        self.at = min(self.at + 1, len(self.text))
        return pieces

    def _expansion(self, quoted: bool) -> list[Piece]:
        """Read an expansion, which begins with $, a backtick, <( or >(."""
        start, two = self.at, self.peek(2)
        if two in ("$'", '$"') and not quoted:
            self.at += 1
            if two == '$"':
                return self._double_quoted()
            return [Piece(self._match(_ANSI_QUOTED)[0].strip("'"), quoted=True)]
        if self.peek(3) == "$((":
            self.at += 1
            self.arithmetic()
        elif two in ("$(", "<(", ">("):
            self._substitution()
        elif two == "${":
            self._braces()
        elif two[0] == "`":
            self._backticks()
        else:
            match = _SIMPLE_VARIABLE.match(self.text, self.at + 1)
            self.at = match.end() if match else self.at + 1
            return [Piece(self.text[start : self.at], match is not None, quoted)]
        return [Piece(self.text[start : self.at], True, quoted)]

    def _substitution(self) -> None:
        self.at = self.nested(self.text, self.starts, self.first_line, self.at + 2)

    def _backticks(self) -> None:
        line = self.line(self.at)
        match = self._match(_IN_BACKTICKS)
        inner = match[1].replace("\\`", "`")
        self.nested(inner, line_starts(inner), line, 0)

    def _braces(self) -> None:
        """Skip ${…}, with others in it."""
        depth = 0
        for match in _BRACES.finditer(self.text, self.at):
            if match[0] == "${":
                depth += 1
            elif match[0] == "}":
                depth -= 1
            if depth == 0:
                self.at = match.end()
                return
        self.at = len(self.text)

    def arithmetic(self) -> None:
        """Skip ((…))."""
        depth = 0
        for match in _BRACKETS.finditer(self.text, self.at):
            depth += 1 if match[0] == "(" else -1
            if depth == 0:
                self.at = match.end()
                return
        self.at = len(self.text)


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Remove empty pieces, but keep one for an empty word."""
    return tuple(piece for piece in pieces if piece.text) or tuple(pieces[:1])
