"""Reader of a script's #SBATCH lines, which also finds what sbatch would refuse.

sbatch(1), DESCRIPTION: they end at the first line that is neither a comment nor white space. The
treatment of quotes, backslashes and # was tested with sbatch 22.05.
"""

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.sbatch_options import KINDS, SHORT, SRUN_ONLY, long_name, similar

__all__ = ["MARK", "Component", "Directive", "Directives", "read_directives"]

MARK = "#SBATCH"
# More than a script has; further lines are ignored.
_MOST_LINES = 1000
# White space, then a word of plain characters, quoted ones and escaped ones, to # or white space.
# A backslash goes, in quotes as well, and keeps a quote or a # after it, but no space.
_WORD = re.compile(r"""\s*((?:\\\S?|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s'"\\#])*)""")
_PARTS = re.compile(r"""'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)"|(\\\S?|[^\s'"\\])""")
_ESCAPED = re.compile(r"\\(.?)")


class Directive(NamedTuple):
    """An option in a #SBATCH line.

    Attributes:
        line: line number in the script, from 1.
        name: long name, without hyphens.
        value: value as sbatch reads it, without quotes; empty if there is none.
    """

    line: int
    name: str
    value: str


class Component(list[Directive]):
    """Options of a job, or of one part of a heterogeneous job."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, Directive] = {}

    def add(self, directive: Directive) -> None:
        """Add an option."""
        self.append(directive)
        self._last[directive.name] = directive

    def get(self, name: str) -> Directive | None:
        """Return the last option of a name, which is the valid one."""
        return self._last.get(name)

    def value(self, name: str) -> str:
        """Return the value of an option; empty if it is not given."""
        found = self.get(name)
        return found.value if found else ""

    def number(self, name: str) -> int | None:
        """Return the value as a number; None if it is not given, or is no number."""
        value = self.value(name)
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


@dataclass
class Directives:
    """The #SBATCH lines of a script.

    Attributes:
        components: options; several components only for a heterogeneous job.
        problems: lines that sbatch refuses or reads in another way, by the rule that reports them.
        end: number of the first line with a command, or of the line after the last one.
    """

    components: list[Component] = field(default_factory=lambda: [Component()])
    problems: dict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    end: int = 0


class _ProblemError(Exception):
    """What is wrong in a line: the rule that reports it, the reason, and fixes."""

    def __init__(self, rule: str, reason: str, *fixes: str) -> None:
        super().__init__(reason)
        self.rule, self.reason, self.fixes = rule, reason, fixes


def _refused(why: str, *fixes: str) -> _ProblemError:
    types = (f"type {fix}" for fix in fixes)
    return _ProblemError("directive-refused", f"sbatch refuses this line: {why}", *types)


def read_directives(lines: list[str]) -> Directives:
    """Read the lines of a script up to the first command."""
    read = Directives(end=len(lines) + 1)
    marked = 0
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            read.end = number
            break
        if not line.startswith(MARK):
            continue
        words, problem = _split(line[len(MARK) :])
        problems = [problem] if problem else []
        try:
            if words in (["hetjob"], ["packjob"]):
                read.components.append(Component())
            else:
                _take(deque(words), number, read.components[-1])
        except _ProblemError as error:
            problems.append(error)
        for one in problems:
            read.problems[one.rule].append((number, one.reason, *one.fixes))
        marked += 1
        if marked == _MOST_LINES:
            break
    return read


def _split(text: str) -> tuple[list[str], _ProblemError | None]:
    """Split as sbatch does, and find an open quote or a word that # cuts."""
    words: list[str] = []
    at = 0
    while match := _WORD.match(text, at):
        at = match.end()
        parts = (one[1] or one[2] or one[3] or "" for one in _PARTS.finditer(match[1]))
        word = "".join(_ESCAPED.sub(r"\1", part) for part in parts)
        words += [word] if word else []
        if text[at : at + 1] == "#":
            return words, _cut(text[at:]) if match[1] else None
        if not match[1]:
            break
    rest = text[at:].strip()
    if rest:
        fix = "the other quote; a #SBATCH line ends with its line"
        return words, _refused(f"a quote in {shown(rest)} is not closed", fix)
    return words, None


def _cut(rest: str) -> _ProblemError:
    return _ProblemError(
        "directive-cut",
        f"sbatch reads {shown(rest)} as a comment, although there is no space before it",
        "put the value into quotes",
        "put a space before the comment",
    )


def _take(words: deque[str], line: int, options: Component) -> None:
    """Add the options of a line up to the first wrong one, as sbatch stops there."""
    while words:
        word = words.popleft()
        if word.startswith("--") and len(word) > 2:
            _take_long(word[2:], words, line, options)
        elif word.startswith("-") and len(word) > 1:
            _take_short(word, words, line, options)
        else:
            fix = "an option begins with - or --, such as --name=value"
            if word.startswith(("–", "—", "−")):
                fix = f"type two hyphens in place of the dash: --{shown(word.lstrip('–—−'))}"
            reason = f"sbatch refuses {shown(word)}: no option"
            raise _ProblemError("directive-refused", reason, fix)


def _take_long(text: str, rest: deque[str], line: int, options: Component) -> None:
    given, equals, value = text.partition("=")
    name = long_name(given)
    if name is None:
        _check_unknown(given)
        # It may be an option of a plugin, and the word after it its value.
        if rest and not rest[0].startswith("-"):
            rest.popleft()
        return
    if KINDS[name] == "none" and equals:
        raise _refused(f"--{given} takes no value", f"#SBATCH --{name}")
    if KINDS[name] == "required" and not equals:
        if not rest:
            raise _refused(f"--{given} needs a value", f"#SBATCH --{name}=…")
        value = rest.popleft()
        if value.startswith("="):
            raise _refused(f"there is a space before = in --{given} =", f"--{name}=…")
    options.add(Directive(line, name, value))


def _check_unknown(given: str) -> None:
    rule = "unknown-option"
    if given in SRUN_ONLY:
        raise _ProblemError(rule, f"sbatch refuses --{given}", f"type {SRUN_ONLY[given]}")
    meant = similar(given)
    if meant:
        fixes = (f"type --{name}" for name in meant)
        raise _ProblemError(rule, f"sbatch has no option --{shown(given)}", *fixes)


def _take_short(word: str, rest: deque[str], line: int, options: Component) -> None:
    """Add one or several short options, as in -Hv or -N2."""
    for index, letter in enumerate(word[1:], 1):
        name = SHORT.get(letter)
        if name is None:
            fix = "one that sbatch --help lists"
            raise _refused(f"sbatch has no option -{shown(letter)}", fix)
        if KINDS[name] == "required":
            value = word[index + 1 :]
            if "=" in word and long_name(word[1:].partition("=")[0]):
                raise _refused(f"{shown(word)} has one hyphen", f"-{shown(word)}")
            if value.startswith("="):
                fixes = (f"-{letter} {shown(value[1:])}", f"--{name}{shown(value)}")
                raise _refused(f"the = in {shown(word)} is read as part of the value", *fixes)
            if not value and not rest:
                raise _refused(f"-{letter} needs a value", f"#SBATCH --{name}=…")
            options.add(Directive(line, name, value or rest.popleft()))
            return
        options.add(Directive(line, name, ""))
        if KINDS[name] == "optional":
            return
