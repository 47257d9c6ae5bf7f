"""Commands of a bash script, with the values of simple variables filled in.

One regular expression splits the text, in a time proportional to its length. There is no grammar:
`$(…)` is a part of a word, and what is in it is not looked at. ShellCheck knows bash; the rules
here need only the lines that start programs.
"""

import itertools
import re
from collections import Counter
from typing import NamedTuple

__all__ = ["Command", "Shell", "Variable", "as_in_task", "plain"]

_GROUP = r"\([^()]*\)"
for _ in range(3):
    _GROUP = rf"\((?:[^()]|{_GROUP})*\)"
# Substitutions and arithmetic, arrays, and backticks.
_WHOLE = re.compile(rf"[$<>]{_GROUP}|(?<=[\w+\]]=){_GROUP}|`[^`\n]*`")
# A command with the comment and the operator behind it. A quote as an operator is never closed. The
# lookahead takes as much as it can and gives nothing back. *+ would, but Python before 3.11.5 then
# finds wrong groups, so no part of a pattern here fits the same text in two ways.
_COMMAND = re.compile(
    rf"""
    (?= ( (?: \\. | '[^']*' | "(?:\\.|{_WHOLE.pattern}|(?!{_WHOLE.pattern})[^"\\])*"
        | {_WHOLE.pattern} | &> | [<>]+[&|]? | (?<=[^\s;&|()])\# | [^;&|()<>'"\\\n\#] )* ) ) \1
    ( \#[^\n]* )?
    ( ;;&? | ;& | && | \|[|&]? | [;&()\n'"\\] | \Z )
    """,
    re.VERBOSE | re.DOTALL,
)
_WORD = re.compile(r"""(?s)(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"\\])+""")
_QUOTED = re.compile(r"""(?s)\$?'([^']*)'|\$?"((?:\\.|[^"\\])*)"|(\\.)""")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"\\]?)(\w+)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
# Each assignment, also NAME+=… and ((NAME++)).
_ASSIGNED = re.compile(r"(?<![\w$-])([A-Za-z_]\w*)(?:\+?=|\+\+)")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_OPENS = ("{", "if", "case", "for", "select", "while", "until")
_CLOSES = ("}", "fi", "esac", "done")
_LOOPS = ("for", "select", "while", "until")
_KEYWORDS = (*_OPENS, *_CLOSES, "then", "do", "else", "elif", "!", "time", "coproc")
# More than a batch script and a command have; what is longer is cut.
_MOST_COMMANDS, _MOST_WORDS, _MOST_IN_WORD = 2_000, 200, 1_000
# White space and quotes in a substitution, and a dollar that expands nothing, are replaced by
# characters for private use.
_MASK = {ord(char): 0xE000 + ord(char) for char in " \t\n'\"\\"}
_PLAIN = {0xE000 + ord(char): char for char in " \t\n'\"\\$"}
_DOLLAR = chr(0xE000 + ord("$"))
# What the batch shell expands in a text for the shell of a task.
_EXPANDED = chr(0xE000)


class Variable(NamedTuple):
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


class Command(NamedTuple):
    """A simple command.

    Attributes:
        line: line number.
        words: name and arguments, without quotes; a dollar that expands nothing is masked.
        background: whether & follows.
        conditional: whether it may not be executed, or more than once: in an if, a loop, a
            function or another group, or after && or ||.
        loop: line number of the outermost loop around it; 0 outside of loops.
        environment: variables that are set for this command alone.
        document: here-document that it reads; a dollar that expands nothing is masked.
    """

    line: int
    words: list[str]
    background: bool
    conditional: bool
    loop: int
    environment: dict[str, str]
    document: str


class Shell:
    """What a script has.

    Attributes:
        commands: commands in order, without those in $(…).
        comments: line numbers and texts.
        variables: assignments in order.
        in_background: whether there is any &.
        parallel_loops: line numbers of the outermost loops with an & in them.
        open_quote: line number of a quote that is not closed; 0 if there is none.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[Command] = []
        self.comments: list[tuple[int, str]] = []
        self.variables: list[Variable] = []
        self.in_background, self.open_quote = False, 0
        self.parallel_loops: set[int] = set()
        self._exported: set[str] = set()
        self._exports_all = False
        self._assignments: dict[str, list[Variable]] = {}
        self._known: dict[str, str | None] = {}
        self._depth, self._after = 0, ""
        self._loops: list[int] = []
        counts = Counter(_ASSIGNED.findall(text))
        self._changing = {name for name, count in counts.items() if count > 1}
        text, self._documents = _without_here_documents(text)
        line = 1
        for match in _COMMAND.finditer(text):
            words, comment, operator = match.groups()
            self._take(words, line, operator)
            line += match[0].count("\n")
            if comment:
                self.comments.append((line - (operator == "\n"), comment))
            if operator in ("'", '"'):
                self.open_quote = self.open_quote or line
            if len(self.commands) == _MOST_COMMANDS:
                break

    def exported(self, name: str) -> Variable | None:
        """Return the assignment of an exported variable; None if its value is not certain."""
        return self.assigned(name) if self.exports(name) else None

    def exports(self, name: str) -> bool:
        """Check whether the script exports a variable."""
        return self._exports_all or name in self._exported

    def assigned(self, name: str) -> Variable | None:
        """Return the assignment of a variable; None if there are several, or a condition."""
        found = self._assignments.get(name, [])
        return found[0] if len(found) == 1 and found[0].sure else None

    def _take(self, raw: str, line: int, operator: str) -> None:
        text = _WHOLE.sub(_masked, raw.replace("\\\n", ""))
        words = _WORD.findall(text)[:_MOST_WORDS]
        while words and words[0] in _KEYWORDS:
            self._take_keyword(words.pop(0), line)
        conditional = self._depth > 0 or self._after in ("&&", "||")
        self._after = operator
        loop = self._loops[0] if self._loops else 0
        if operator == "&":
            self.in_background = True
            self.parallel_loops.add(loop)
        inline = list(itertools.takewhile(_ASSIGNMENT.match, words))
        rest = words[len(inline) :]
        if rest:
            pairs = (word.partition("=") for word in inline)
            environment = {name: self._filled(value) for name, _, value in pairs}
            lines = range(line, line + raw.count("\n") + 1) if "<<" in raw else ()
            document = "".join(self._documents.get(number, "") for number in lines)
            expanded, background = self._expand(rest), operator == "&"
            self.commands.append(
                Command(line, expanded, background, conditional, loop, environment, document)
            )
        for word in inline:
            self._assign(word, line, sure=not conditional and not rest)
        if rest[:1] == ["set"]:
            self._exports_all |= not {"-a", "allexport"}.isdisjoint(rest)
        for word in rest[1:] if rest and rest[0] in _DECLARES else ():
            if _ASSIGNMENT.match(word):
                self._assign(word, line, sure=not conditional)
            if rest[0] == "export" or re.match(r"-\w*x", rest[1]):
                self._exported.add(word.partition("=")[0])

    def _take_keyword(self, word: str, line: int) -> None:
        self._depth = max(0, self._depth + (word in _OPENS) - (word in _CLOSES))
        if word in _LOOPS:
            self._loops.append(line)
        elif word == "done" and self._loops:
            self._loops.pop()

    def _assign(self, word: str, line: int, sure: bool) -> None:
        name, _, text = word.partition("=")
        # NAME+=, NAME[…]= and an array have values that nobody needs here.
        sure = sure and name.isidentifier() and not text.startswith("(")
        name, value = re.split(r"[+[]", name)[0], self._filled(text)
        self.variables.append(Variable(line, name, value, sure))
        self._assignments.setdefault(name, []).append(self.variables[-1])
        self._known[name] = value if sure and name not in self._known else None

    def _expand(self, words: list[str]) -> list[str]:
        expanded: list[str] = []
        for word in words:
            text = self._filled(word)
            expanded += text.split() if _REFERENCE.fullmatch(word) and text != word else [text]
        return expanded[:_MOST_WORDS] or [""]

    def _filled(self, word: str) -> str:
        text = _QUOTED.sub(_unquoted, word[:_MOST_IN_WORD])
        text = _REFERENCE.sub(lambda name: self._value(name[1] or name[2]) or name[0], text)
        return text[:_MOST_IN_WORD]

    def _value(self, name: str) -> str | None:
        # A loop may change it for its next turn.
        return None if self._loops and name in self._changing else self._known.get(name)


def plain(text: str) -> str:
    """Return a word, or several, as in the script."""
    return text.translate(_PLAIN)


def as_in_task(word: str) -> str:
    """Return a word as the shell of a task reads it, with only the dollars that are left to it."""
    return plain(_WHOLE.sub(_EXPANDED, word).replace("$", _EXPANDED))


def _without_here_documents(text: str) -> tuple[str, dict[int, str]]:
    """Return the text without here-documents, and these by the line in which they are announced."""
    lines = text.split("\n")
    ends, until, first, quoted = {line.lstrip("\t") for line in lines}, "", 0, False
    documents: dict[int, list[str]] = {}
    for index, line in enumerate(lines):
        if until:
            lines[index] = ""
            if line.lstrip("\t") == until:
                until = ""
            else:
                documents[first].append(line.replace("$" if quoted else "\\$", _DOLLAR))
        elif (begin := _HERE_DOCUMENT.search(line)) and begin[2] in ends:
            first, quoted, until = index + 1, bool(begin[1]), begin[2]
            documents[first] = []
    return "\n".join(lines), {number: "\n".join(one) for number, one in documents.items()}


def _masked(match: re.Match[str]) -> str:
    single = re.sub("'[^']*'", lambda quoted: quoted[0].replace("$", _DOLLAR), match[0])
    return single.translate(_MASK)


def _unquoted(match: re.Match[str]) -> str:
    if match[1] is not None:
        return match[1].replace("$", _DOLLAR)
    text = (match[3] or match[2]).replace("\\$", _DOLLAR)
    return re.sub(r"(?s)\\(.)", r"\1", text)
