"""Reader of bash scripts, which finds their commands without a full grammar.

It reads any text: words, quotes, continuations, comments, here-documents, substitutions, groups,
functions and background commands. It does not report syntax errors.
"""

import re
from dataclasses import dataclass, field

from hpctrain.jobs.lint.script_reader import ASSIGNMENT, META, WordReader, line_starts
from hpctrain.jobs.lint.words import Word

__all__ = ["Command", "Comment", "Shell", "read"]

_OPERATORS = (
    *(";;&", "&>>", "<<<", "<<-"),
    *(";;", ";&", "&&", "||", "|&", "&>", ">>", "<<", "<&", ">&", ">|", "<>"),
    *(";", "&", "|", "<", ">", "(", ")"),
)
_REDIRECTIONS = frozenset(("&>>", "<<<", "<<-", "&>", ">>", "<<", "<&", ">&", ">|", "<>", "<", ">"))
_LOOPS = ("for", "select", "while", "until")
_OPENS = {"{": "}", "if": "fi", "case": "esac", **dict.fromkeys(_LOOPS, "done")}
_CLOSES = frozenset(_OPENS.values())
# After these, a command begins.
_BEFORE_COMMAND = frozenset(
    ("then", "do", "else", "elif", "!", "time", "if", "while", "until", "{")
)
_COPROC = re.compile(r"[ \t]+(?:[A-Za-z_]\w*[ \t]+)?(?=\{)")
# Limits for nested substitutions and groups; deeper ones are ignored.
_DEEPEST = 40
_MOST_GROUPS = 100


@dataclass(frozen=True)
class Comment:
    """A comment, with its #, and whether only white space is before it in its line."""

    line: int
    text: str
    alone: bool


@dataclass
class Command:
    """A simple command.

    Attributes:
        line: line number of its beginning, from 1.
        words: name and arguments.
        assignments: complete assignments before the name (`NAME=value`).
        function: function that contains the command; empty outside of functions.
        background: whether the command runs in the background.
        substituted: whether the command is in $(…) or a similar substitution.
        conditional: whether the command is in an if, a loop, a case, or after && or ||.
    """

    line: int
    words: list[Word] = field(default_factory=list)
    assignments: list[Word] = field(default_factory=list)
    function: str = ""
    background: bool = False
    substituted: bool = False
    conditional: bool = False


@dataclass
class Shell:
    """Commands of a script in the order of its text, and its comments."""

    commands: list[Command] = field(default_factory=list)
    comments: list[Comment] = field(default_factory=list)


@dataclass
class _Group:
    closed_by: str
    list_first: int
    function: str


def read(text: str, line: int = 1) -> Shell:
    """Return the commands and comments of a script.

    Args:
        text: any text; the time is proportional to its length.
        line: number of its first line.
    """
    shell = Shell()
    _Reader(text, line_starts(text), line, shell).read()
    shell.commands.sort(key=lambda command: command.line)
    return shell


class _Reader(WordReader):
    """Reader from a position in the text to its end, or to the end of a substitution."""

    def __init__(
        self, text: str, starts: list[int], line: int, shell: Shell, at: int = 0, depth: int = 0
    ) -> None:
        super().__init__(text, starts, line, at)
        self.shell, self.depth = shell, depth
        self.groups: list[_Group] = []
        self.here_documents: list[tuple[str, bool]] = []
        self.commands: list[Command] = []
        self.list_first = 0
        self.function = self.pending_function = ""
        self.current = Command(0)
        self.after_and_or = False
        self.pattern = self.inside = False

    def read(self, closed_by: str = "") -> int:
        """Read the commands, and return the position after the end."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t":
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif char == "\n":
                self.at += 1
                self.end("\n")
                self.skip_here_documents()
            elif char == "#":
                self.comment()
            elif char == ")" and closed_by and not self.pattern and not self.in_brackets():
                self.end(";")
                self.at += 1
                break
            elif char in META and self.peek(2) not in ("<(", ">("):
                self.operator()
            else:
                self.take(self.word())
        self.end(";")
        self.shell.commands += self.commands
        return self.at

    def nested(self, text: str, starts: list[int], first_line: int, at: int) -> int:
        """Read the commands of $(…) from a position, and return the position after it."""
        if self.depth == _DEEPEST:
            return len(text)
        reader = _Reader(text, starts, first_line, self.shell, at, self.depth + 1)
        reader.function = self.function
        reader.inside = self.in_branch()
        return reader.read(")")

    def in_branch(self) -> bool:
        """Check whether the position is in an if, a loop or a case."""
        return self.inside or any(one.closed_by in ("fi", "done", "esac") for one in self.groups)

    def in_brackets(self) -> bool:
        return any(group.closed_by == ")" for group in self.groups)

    def comment(self) -> None:
        start = self.at
        end = self.text.find("\n", start)
        self.at = len(self.text) if end < 0 else end
        before = self.text[self.starts[self.line(start) - self.first_line] : start]
        text = self.text[start : self.at]
        self.shell.comments.append(Comment(self.line(start), text, not before.strip()))

    def operator(self) -> None:
        if not self.current.words and self.peek(2) == "((":
            self.arithmetic()
            return
        operator = next(one for one in _OPERATORS if self.text.startswith(one, self.at))
        start = self.at
        self.at += len(operator)
        if operator in _REDIRECTIONS:
            self.redirection(operator, start)
        elif operator == "(":
            self.open_bracket()
        elif operator == ")":
            self.close_bracket()
        else:
            self.end(operator)

    def redirection(self, operator: str, start: int) -> None:
        """Drop a redirection with its target and the number before it."""
        words = self.current.words
        if words and words[-1].bare.isdigit() and self.text[start - 1].isdigit():
            words.pop()
        while self.peek() in (" ", "\t"):
            self.at += 1
        if self.peek() and (self.peek() not in META or self.peek(2) in ("<(", ">(")):
            target = self.word()
            if operator in ("<<", "<<-"):
                self.here_documents.append((target.text, operator == "<<-"))

    def skip_here_documents(self) -> None:
        for delimiter, tabs in self.here_documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self.here_documents.clear()

    def open_bracket(self) -> None:
        words = self.current.words
        if self.pattern:
            return
        if len(words) == 1 and re.match(r"[ \t]*\)", self.text[self.at : self.at + 80]):
            self.at = self.text.index(")", self.at) + 1
            self.pending_function = words[0].text
            self.current = Command(0)
            return
        self.end(";")
        self.open(")")

    def close_bracket(self) -> None:
        if self.pattern:
            self.pattern = False
            self.current = Command(0)
        else:
            self.end(";")
            self.close(")")

    def open(self, closed_by: str) -> None:
        if len(self.groups) == _MOST_GROUPS:
            return
        self.groups.append(_Group(closed_by, self.list_first, self.function))
        if self.pending_function:
            self.function, self.pending_function = self.pending_function, ""
        self.list_first = len(self.commands)

    def close(self, closed_by: str) -> None:
        """End a group: an operator after it, such as &, applies to all of its commands."""
        if self.groups and self.groups[-1].closed_by == closed_by:
            group = self.groups.pop()
            self.list_first, self.function = group.list_first, group.function

    def end(self, operator: str) -> None:
        """End a simple command and, with most operators, its list."""
        if self.current.words or self.current.assignments:
            self.commands.append(self.current)
        self.current = Command(0)
        if operator == "&":
            for command in self.commands[self.list_first :]:
                command.background = True
        self.after_and_or = operator in ("&&", "||")
        if operator not in ("&&", "||", "|", "|&"):
            self.list_first = len(self.commands)
        if operator in (";;", ";&", ";;&"):
            self.pattern = True

    def take(self, word: Word) -> None:
        """Take a word: a keyword, or the next word of a command."""
        current, bare = self.current, word.bare
        if self.pattern and bare != "esac":
            return
        if not current.words:
            if self.keyword(bare):
                return
            if not current.line:
                current.line, current.function = word.line, self.function
                current.substituted = self.depth > 0
                current.conditional = self.in_branch() or self.after_and_or
            if (
                word.pieces
                and ASSIGNMENT.match(word.pieces[0].text)
                and not (word.pieces[0].quoted or word.pieces[0].expands)
            ):
                current.assignments.append(word)
                return
        current.words.append(word)
        if bare == "in" and len(current.words) == 3 and current.words[0].bare == "case":
            self.end("|")
            self.pattern = True

    def keyword(self, bare: str) -> bool:
        """Check whether a word in the place of a command's name is a keyword, and apply it."""
        if self.current.assignments or not bare:
            return False
        if bare == "coproc":
            match = _COPROC.match(self.text, self.at)
            self.at = match.end() if match else self.at
            return True
        if bare == "function":
            match = re.compile(r"[ \t]+([^\s()]+)[ \t]*(\([ \t]*\))?").match(self.text, self.at)
            if match:
                self.at, self.pending_function = match.end(), match[1]
            return True
        if bare in _CLOSES:
            self.pattern = False
            self.close(bare)
            return True
        if bare in _OPENS:
            self.open(_OPENS[bare])
        return bare in _BEFORE_COMMAND
