"""Commands of a bash script, with the values of simple variables filled in.

One regular expression splits the text, in a time proportional to its length. There is no grammar:
`$(…)` is a part of a word, and what is in it is not looked at. ShellCheck knows bash; the rules
here need only the lines that start programs.
"""

import itertools
import re
from typing import NamedTuple

__all__ = ["Command", "Shell", "Variable", "plain"]

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
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*['\"\\]?(\w+)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_OPENS = ("{", "if", "case", "for", "select", "while", "until")
_CLOSES = ("}", "fi", "esac", "done")
_KEYWORDS = (*_OPENS, *_CLOSES, "then", "do", "else", "elif", "!", "time", "coproc")
# More than a batch script and a command have; what is longer is cut.
_MOST_COMMANDS, _MOST_WORDS, _MOST_IN_WORD = 2_000, 200, 1_000
# White space and quotes in a substitution, and a dollar that expands nothing, are replaced by
# characters for private use.
_MASK = {ord(char): 0xE000 + ord(char) for char in " \t\n'\"\\"}
_PLAIN = {0xE000 + ord(char): char for char in " \t\n'\"\\$"}
_DOLLAR = chr(0xE000 + ord("$"))


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
    """

    line: int
    words: list[str]
    background: bool
    conditional: bool


class Shell:
    """What a script has.

    Attributes:
        commands: commands in order, without those in $(…).
        comments: line numbers and texts.
        variables: assignments in order.
        in_background: whether there is any &.
        open_quote: line number of a quote that is not closed; 0 if there is none.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[Command] = []
        self.comments: list[tuple[int, str]] = []
        self.variables: list[Variable] = []
        self.in_background, self.open_quote = False, 0
        self._exported: set[str] = set()
        self._known: dict[str, str | None] = {}
        self._depth, self._after = 0, ""
        line = 1
        for match in _COMMAND.finditer(_without_here_documents(text)):
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
        found = [one for one in self.variables if one.name == name]
        return found[0] if len(found) == 1 and found[0].sure and name in self._exported else None

    def _take(self, text: str, line: int, operator: str) -> None:
        text = _WHOLE.sub(_masked, text.replace("\\\n", ""))
        words = _WORD.findall(text)[:_MOST_WORDS]
        while words and words[0] in _KEYWORDS:
            self._depth = max(0, self._depth + (words[0] in _OPENS) - (words[0] in _CLOSES))
            del words[0]
        conditional = self._depth > 0 or self._after in ("&&", "||")
        self._after = operator
        self.in_background |= operator == "&"
        inline = list(itertools.takewhile(_ASSIGNMENT.match, words))
        rest = words[len(inline) :]
        if rest:
            self.commands.append(Command(line, self._expand(rest), operator == "&", conditional))
        for word in inline:
            self._assign(word, line, sure=not conditional and not rest)
        for word in rest[1:] if rest and rest[0] in _DECLARES else ():
            if _ASSIGNMENT.match(word):
                self._assign(word, line, sure=not conditional)
            if rest[0] == "export":
                self._exported.add(word.partition("=")[0])

    def _assign(self, word: str, line: int, sure: bool) -> None:
        name, _, text = word.partition("=")
        # NAME+=, NAME[…]= and an array have values that nobody needs here.
        sure = sure and name.isidentifier() and not text.startswith("(")
        name, value = re.split(r"[+[]", name)[0], self._filled(text)
        self.variables.append(Variable(line, name, value, sure))
        self._known[name] = value if sure and name not in self._known else None

    def _expand(self, words: list[str]) -> list[str]:
        expanded: list[str] = []
        for word in words:
            text = self._filled(word)
            expanded += text.split() if _REFERENCE.fullmatch(word) and text != word else [text]
        return expanded[:_MOST_WORDS] or [""]

    def _filled(self, word: str) -> str:
        text = _QUOTED.sub(_unquoted, word[:_MOST_IN_WORD])
        text = _REFERENCE.sub(lambda name: self._known.get(name[1] or name[2]) or name[0], text)
        return text[:_MOST_IN_WORD]


def plain(text: str) -> str:
    """Return a word, or several, as in the script."""
    return text.translate(_PLAIN)


def _without_here_documents(text: str) -> str:
    lines = text.split("\n")
    ends, until = {line.lstrip("\t") for line in lines}, ""
    for index, line in enumerate(lines):
        if until:
            lines[index], until = "", "" if line.lstrip("\t") == until else until
        elif (begin := _HERE_DOCUMENT.search(line)) and begin[1] in ends:
            until = begin[1]
    return "\n".join(lines)


def _masked(match: re.Match[str]) -> str:
    single = re.sub("'[^']*'", lambda quoted: quoted[0].replace("$", _DOLLAR), match[0])
    return single.translate(_MASK)


def _unquoted(match: re.Match[str]) -> str:
    if match[1] is not None:
        return match[1].replace("$", _DOLLAR)
    text = (match[3] or match[2]).replace("\\$", _DOLLAR)
    return re.sub(r"(?s)\\(.)", r"\1", text)
