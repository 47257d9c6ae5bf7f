"""Commands of a bash script, with the values of simple variables filled in.

One regular expression splits the text, in a time proportional to its length. There is no grammar:
`$(…)` is a part of a word, and what is in it is not looked at. ShellCheck knows bash; the rules
here need only the lines that start programs.
"""

import itertools
import re
from dataclasses import dataclass, field

__all__ = ["Assignment", "Command", "Shell", "plain", "read"]

_TOKEN = re.compile(
    r"""
    (?P<gap> [ \t]+ | \\\n )
  | (?P<comment> \#[^\n]* )
  | (?P<redirection> \d* (?: <<< | <<-? | [<>]& | &>>? | >> | >\| | <> | [<>] ) )
  | (?P<operator> \n | \([ \t]*\) | ;;&? | ;& | && | \|\| | \|& | [;&|()] )
  | (?P<word> (?: \\. | '[^']*' | "(?:\\.|[^"\\])*" | [^\s;&|()<>'"\\]+ )+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(
    r"""\$?'(?P<single>[^']*)'|\$?"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.?)""", re.DOTALL
)
_IN_DOUBLE_QUOTES = re.compile(r"\\([$`\"\\\n])")
# Arithmetic, substitutions, elements of an array, and backticks: all without round brackets in it.
_SUBSTITUTION = re.compile(r"\$?\(\([^()]*\)\)|[$<>]\([^()]*\)|(?<=[\w+\]]=)\([^()]*\)|`[^`\n]*`")
_NESTED = 4
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_DECLARES = frozenset(("export", "declare", "local", "readonly", "typeset"))
_CHANGES = frozenset(("for", "select", "read", "unset", "mapfile", "readarray", "getopts"))
_OPENS = frozenset(("{", "if", "case", "for", "select", "while", "until"))
_CLOSES = frozenset(("}", "fi", "esac", "done"))
# After these, a command begins.
_BEFORE_COMMAND = _CLOSES | frozenset(
    ("then", "do", "else", "elif", "!", "time", "if", "while", "until", "{", "coproc")
)
_MOST_CHARACTERS = 2_000
_MOST_WORDS = 200

# What a word contains literally, although it has a meaning for the shell elsewhere, is replaced by
# characters for private use while words are split and filled in.
_SPECIAL = " \t\n;&|()<>'\"`\\#"
_MASK = {ord(char): 0xE000 + ord(char) for char in _SPECIAL}
_DOLLAR, _BACKTICK = chr(0xE000 + ord("$")), chr(0xE000 + ord("`"))
_UNMASK = {0xE000 + ord(char): char for char in _SPECIAL + "$"}


@dataclass(frozen=True)
class Assignment:
    """An assignment to a variable.

    Attributes:
        line: line number of its command.
        name: name of the variable.
        value: value with the variables that are known; another expansion is as in the script.
        sure: whether it is executed, once, and for the whole script.
    """

    line: int
    name: str
    value: str
    sure: bool

    @property
    def literal(self) -> bool:
        """Whether the shell replaces nothing in the value."""
        return "$" not in self.value and _BACKTICK not in self.value


@dataclass
class Command:
    """A simple command.

    Attributes:
        line: line number of its first word.
        words: name and arguments, without quotes; a dollar that expands nothing is masked.
        inline: values of the assignments before the name.
        background: whether & follows.
        conditional: whether it may not be executed, or more than once: in an if, a loop, a
            function or another group, or after && or ||.
        function: function that contains the command; empty outside of functions.
    """

    line: int
    words: list[str]
    inline: dict[str, str]
    background: bool
    conditional: bool
    function: str


@dataclass
class Shell:
    """What a script has.

    Attributes:
        commands: commands in order, without those in $(…).
        comments: line numbers and texts.
        assignments: assignments in order.
        exported: names of exported variables.
        in_background: whether there is any &.
        open_quote: line number of a quote that is not closed; 0 if there is none.
    """

    commands: list[Command] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    in_background: bool = False
    open_quote: int = 0

    def get(self, name: str) -> Assignment | None:
        """Return the assignment of a variable; None if its value is not certain."""
        found = [one for one in self.assignments if one.name == name]
        return found[0] if len(found) == 1 and found[0].sure else None


def plain(text: str) -> str:
    """Return a word, or several, as in the script."""
    return text.translate(_UNMASK)


def read(text: str) -> Shell:
    """Return the commands, comments and variables of any text."""
    return _Reader(text).read()


def _masked(text: str) -> str:
    """Make each substitution a part of one word. Positions stay the same."""
    for _ in range(_NESTED):
        text = _SUBSTITUTION.sub(_mask, text)
    return text


def _mask(match: re.Match[str]) -> str:
    literal = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("$", _DOLLAR), match[0])
    return literal.translate(_MASK)


def _unquoted(word: str) -> str:
    return _QUOTED.sub(_unquote, word)


def _unquote(match: re.Match[str]) -> str:
    if match["double"] is not None:
        return _IN_DOUBLE_QUOTES.sub(_escaped, match["double"])
    return _escaped(match) if match["single"] is None else match["single"].replace("$", _DOLLAR)


def _escaped(match: re.Match[str]) -> str:
    char = match[match.lastindex or 0]
    return {"$": _DOLLAR, "\n": ""}.get(char, char)


class _Reader:
    def __init__(self, text: str) -> None:
        self.original, self.text = text, _masked(text)
        self.at, self.line = 0, 1
        self.shell = Shell()
        self.known: dict[str, str | None] = {}
        self.words: list[str] = []
        self.start = 0
        # Number of groups around a command; and the name of the function, with the number there.
        self.depth, self.function = 0, ("", 0)
        self.redirection = ""
        self.here_documents: list[tuple[str, bool]] = []
        self.after_and_or = self.pattern = False

    def read(self) -> Shell:
        """Read the text from its beginning to its end."""
        while self.at < len(self.text):
            token = _TOKEN.match(self.text, self.at)
            assert token  # The pattern has an alternative for any character.
            kind, text = token.lastgroup, token[0]
            start, self.at = self.at, token.end()
            if kind == "comment":
                self.shell.comments.append((self.line, plain(text)))
            elif kind == "redirection":
                self.redirection = text.lstrip("0123456789")
            elif kind == "operator":
                self.operator(text)
            elif text in ("'", '"'):
                self.shell.open_quote = self.shell.open_quote or self.line
            elif kind == "word":
                self.take(text)
            self.line += self.original.count("\n", start, self.at)
            if text == "\n":
                self.skip_here_documents()
        self.end(";")
        return self.shell

    def skip_here_documents(self) -> None:
        for delimiter, tabs in self.here_documents:
            while self.at < len(self.text):
                end = self.original.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.original[self.at : end]
                self.at = min(end + 1, len(self.text))
                self.line += 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self.here_documents.clear()

    def operator(self, operator: str) -> None:
        if self.pattern and operator in ("(", ")"):
            self.pattern = operator == "("
        elif operator == "(":
            self.depth += 1
        elif operator == ")":
            self.end(";")
            self.close()
        elif operator.startswith("("):
            self.name_function()
        else:
            self.end(operator)

    def name_function(self) -> None:
        self.function, self.words = (self.words[-1] if self.words else "", self.depth), []

    def close(self) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth <= self.function[1]:
            self.function = ("", 0)

    def take(self, word: str) -> None:
        """Take a word: a keyword, the target of a redirection, or a part of a command."""
        if self.redirection:
            if self.redirection in ("<<", "<<-"):
                delimiter = plain(_unquoted(word))
                self.here_documents.append((delimiter, self.redirection == "<<-"))
            self.redirection = ""
        elif not self.pattern or word == "esac":
            if word == "{" and self.words[:1] == ["function"]:
                self.name_function()
            if not self.words and self.keyword(word):
                return
            self.start = self.start if self.words else self.line
            self.words.append(word)
            if word == "in" and self.words[0] == "case":
                self.words, self.pattern = [], True

    def keyword(self, word: str) -> bool:
        """Check whether a word in the place of a command's name is a keyword, and apply it."""
        self.depth += word in _OPENS
        if word in _CLOSES:
            self.pattern = False
            self.close()
        return word in _BEFORE_COMMAND

    def end(self, operator: str) -> None:
        """End a command."""
        if self.words:
            self.command(operator == "&")
        self.words, self.redirection = [], ""
        self.shell.in_background |= operator == "&"
        self.after_and_or = operator in ("&&", "||")
        self.pattern = self.pattern or operator in (";;", ";&", ";;&")

    def command(self, background: bool) -> None:
        conditional = self.after_and_or or self.depth > 0
        rest = list(itertools.dropwhile(_ASSIGNMENT.match, self.words))
        inline = self.words[: len(self.words) - len(rest)]
        for word in inline:
            self.assign(word, sure=not conditional and not rest)
        if not rest:
            return
        words = self.expand(rest)
        values = dict(self.filled(word).split("=", 1) for word in inline)
        command = Command(self.start, words, values, background, conditional, self.function[0])
        self.shell.commands.append(command)
        if words[0] in _DECLARES:
            for word in rest[1:]:
                if _ASSIGNMENT.match(word):
                    self.assign(word, sure=not conditional)
                if words[0] == "export" or "-x" in words:
                    self.shell.exported.add(word.partition("=")[0])
        elif words[0] in _CHANGES:
            for word in words[1:]:
                self.assign(f"{word}=", sure=False)

    def assign(self, word: str, sure: bool) -> None:
        name, _, text = word.partition("=")
        # NAME+=, NAME[…]= and an array have values that nobody needs here.
        sure = sure and name.isidentifier() and plain(text[:1]) != "("
        name, value = re.split(r"[+[]", name)[0], self.filled(text)
        self.shell.assignments.append(Assignment(self.start, name, value, sure))
        self.known[name] = value if sure and name not in self.known else None

    def expand(self, words: list[str]) -> list[str]:
        """Return words without quotes and with the values of their variables."""
        expanded: list[str] = []
        for word in words[:_MOST_WORDS]:
            only = _VARIABLE.fullmatch(word)
            text = self.filled(word)
            expanded += text.split() if only and text != word else [text]
        return expanded[:_MOST_WORDS] or [""]

    def filled(self, word: str) -> str:
        text = _unquoted(word[:_MOST_CHARACTERS])
        return _VARIABLE.sub(self._value, text)[:_MOST_CHARACTERS]

    def _value(self, match: re.Match[str]) -> str:
        value = self.known.get(match[1] or match[2])
        return match[0] if value is None else value
