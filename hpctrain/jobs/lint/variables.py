"""Variables of a script, and the words of its commands with their values."""

from collections.abc import Sequence

from hpctrain.jobs.lint.bash import Shell
from hpctrain.jobs.lint.script_reader import ASSIGNMENT
from hpctrain.jobs.lint.words import Piece, Word

__all__ = ["Variables"]

# Of a word and of a command with its variables filled in.
_MOST_CHARACTERS = 2_000
_MOST_WORDS = 200
_DEEPEST = 4
_DECLARES = frozenset(("export", "declare", "local", "readonly", "typeset"))


class Variables:
    """Values of a script's variables; a value is known if it is assigned only once.

    Attributes:
        assigned: values by name; None for a value that is unknown.
        appended: elements that `NAME+=(…)` adds to an array.
        written: all assignments in the script, each with whether it is always executed.
        exported: line number of the export, by name.
    """

    def __init__(self, shell: Shell) -> None:
        self.assigned: dict[str, list[Word | None]] = {}
        self.appended: dict[str, list[Word]] = {}
        self.written: list[tuple[str, Word, bool]] = []
        self.exported: dict[str, int] = {}
        # Caches, as variables that refer to each other many times would take too long.
        self._texts: dict[tuple[str, int], str] = {}
        self._arrays: dict[tuple[str, int], list[str]] = {}
        for command in shell.commands:
            # In a branch or a function, it is not certain whether and when it runs.
            sure = not command.conditional and not command.function and not command.words
            for word in command.assignments:
                self._assign(word, sure)
            if not command.words:
                continue
            name, *arguments = command.words
            if name.bare in _DECLARES:
                self._declare(name.bare, arguments, sure=not command.conditional)
            elif name.bare in ("for", "select", "read", "unset", "mapfile", "readarray", "getopts"):
                for word in arguments:
                    self.assigned.setdefault(word.bare, []).append(None)

    def _assign(self, word: Word, sure: bool) -> None:
        match = ASSIGNMENT.match(word.text)
        if not match:
            return
        value = word.after(match.end())
        self.written.append((match[1], value, sure))
        if match[3] and value.elements is not None:
            self.appended.setdefault(match[1], []).append(value)
        else:
            known = sure and not match[2] and not match[3]
            self.assigned.setdefault(match[1], []).append(value if known else None)

    def _declare(self, how: str, arguments: Sequence[Word], sure: bool) -> None:
        exports = how == "export" or any(word.bare == "-x" for word in arguments)
        for word in arguments:
            name = word.text.partition("=")[0]
            if "=" in word.text:
                self._assign(word, sure and how != "local")
            if exports:
                self.exported.setdefault(name, word.line)

    def get(self, name: str) -> Word | None:
        """Return the value of a variable; None if it has several values or an unknown one."""
        values = self.assigned.get(name, [])
        return values[0] if len(values) == 1 and name not in self.appended else None

    def array(self, name: str) -> tuple[Word, ...] | None:
        """Return the elements of an array, with all appended ones; None if it is no array."""
        values = self.assigned.get(name, [])
        first = values[0].elements if len(values) == 1 and values[0] else None
        if first is None:
            return None
        return first + tuple(
            one for word in self.appended.get(name, ()) for one in word.elements or ()
        )

    def expand(self, words: Sequence[Word], depth: int = 0) -> list[str]:
        """Return words with the values of their variables; unknown expansions stay unchanged."""
        expanded: list[str] = []
        for word in words:
            expanded += self._word(word, depth)
            if len(expanded) > _MOST_WORDS:
                break
        return expanded[:_MOST_WORDS]

    def _word(self, word: Word, depth: int) -> list[str]:
        only = word.pieces[0] if len(word.pieces) == 1 else None
        if only and only.array and depth < _DEEPEST:
            elements, key = self.array(only.array), (only.array, depth)
            if elements is not None:
                if key not in self._arrays:
                    self._arrays[key] = self.expand(elements, depth + 1)
                return self._arrays[key]
        text = self.text(word, depth)
        known = only and only.variable and not only.quoted and self.get(only.variable)
        return text.split() if known else [text]

    def text(self, word: Word, depth: int = 0) -> str:
        """Return a word as one text."""
        text = ""
        for piece in word.pieces:
            text += self._piece(piece, depth)
            if len(text) > _MOST_CHARACTERS:
                break
        return text[:_MOST_CHARACTERS]

    def _piece(self, piece: Piece, depth: int) -> str:
        value = self.get(piece.variable) if piece.variable and depth < _DEEPEST else None
        if value is None or value.elements is not None:
            return piece.text
        key = (piece.variable, depth)
        if key not in self._texts:
            self._texts[key] = self.text(value, depth + 1)
        return self._texts[key]
