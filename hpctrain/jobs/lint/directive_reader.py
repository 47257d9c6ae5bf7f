"""Reader of a script's #SBATCH lines, which also finds what sbatch would refuse.

sbatch(1), DESCRIPTION: they end at the first line that is neither a comment nor white space. The
treatment of quotes, backslashes and # was tested with sbatch 22.05.
"""

import re
from collections import deque
from dataclasses import dataclass, field

from hpctrain.jobs.lint.lint_finding import LintFinding, shown
from hpctrain.jobs.lint.sbatch_options import SHORT, SRUN_ONLY, argument, long_name, similar

__all__ = ["Component", "Directive", "read_directives"]

_MARK = "#SBATCH"
# More than a script has; further lines are ignored.
_MOST_LINES = 1000
# White space, then a word of plain characters, quoted ones and escaped ones, to # or white space.
# A backslash goes, in quotes as well, and keeps a quote or a # after it, but no space.
_WORD = re.compile(r"""\s*((?:\\\S?|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s'"\\#])*)""")
_PARTS = re.compile(r"""'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)"|(\\\S?|[^\s'"\\])""")
_ESCAPED = re.compile(r"\\(.?)")


@dataclass(frozen=True)
class Directive:
    """An option in a #SBATCH line.

    Attributes:
        line: line number in the script, from 1.
        name: long name, without hyphens.
        value: value as sbatch reads it, without quotes; empty if there is none.
    """

    line: int
    name: str
    value: str


@dataclass
class Component:
    """Options of a job, or of one part of a heterogeneous job."""

    directives: list[Directive] = field(default_factory=list)
    last: dict[str, Directive] = field(default_factory=dict)

    def add(self, directive: Directive) -> None:
        """Add an option."""
        self.directives.append(directive)
        self.last[directive.name] = directive

    def get(self, name: str) -> Directive | None:
        """Return the last option of a name, which is the valid one."""
        return self.last.get(name)

    def value(self, name: str) -> str:
        """Return the value of an option; empty if it is not given."""
        found = self.get(name)
        return found.value if found else ""

    def number(self, name: str) -> int | None:
        """Return the value as a number; None if it is not given, or is no number."""
        value = self.value(name)
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def read_directives(lines: list[str]) -> tuple[list[Component], list[LintFinding], int]:
    """Return the parts of the job, findings, and the end of the #SBATCH lines.

    Args:
        lines: lines of the script.

    Returns:
        Several parts only for a heterogeneous job. The last value is the number of the first line
        with a command, or of the line after the last one.
    """
    components, findings = [Component()], []
    end = len(lines) + 1
    marked = 0
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            end = number
            if number > 1 and _continues(lines[number - 2], line):
                findings.append(_not_continued(number))
            break
        if not line.startswith(_MARK):
            continue
        words, finding = _words(line[len(_MARK) :], number)
        findings += [finding] if finding else []
        if words in (["hetjob"], ["packjob"]):
            components.append(Component())
        else:
            found, wrong = _options(words, number)
            for one in found:
                components[-1].add(one)
            findings += wrong
        marked += 1
        if marked == _MOST_LINES:
            break
    return components, findings, end


def _continues(before: str, line: str) -> bool:
    """Check whether a line with options seems to continue a #SBATCH line."""
    return before.startswith(_MARK) and before.endswith("\\") and line.lstrip().startswith("-")


def _not_continued(line: int) -> LintFinding:
    return LintFinding(
        line,
        "directive-ignored",
        "a backslash does not continue a #SBATCH line: this is a command, which does not exist",
        ("begin the line with #SBATCH",),
    )


def _words(text: str, line: int) -> tuple[list[str], LintFinding | None]:
    """Split as sbatch does, and return a finding for an open quote or a word that # cuts."""
    words: list[str] = []
    at = 0
    while match := _WORD.match(text, at):
        parts = (one[1] or one[2] or one[3] or "" for one in _PARTS.finditer(match[1]))
        word = "".join(_ESCAPED.sub(r"\1", part) for part in parts)
        at = match.end()
        if text[at : at + 1] == "#":
            cut = bool(match[1])
            words += [word] if word else []
            return words, _cut(text[at:], line) if cut else None
        if not match[1]:
            break
        words += [word] if word else []
    if text[at:].strip():
        return words, _refused(
            line,
            f"a quote in {shown(text[at:].strip())} is not closed",
            "the other quote; a #SBATCH line ends with its line",
        )
    return words, None


def _cut(rest: str, line: int) -> LintFinding:
    return LintFinding(
        line,
        "directive-cut",
        f"sbatch reads {shown(rest)} as a comment, although there is no space before it",
        ("put the value into quotes", "put a space before the comment"),
    )


def _options(words: list[str], line: int) -> tuple[list[Directive], list[LintFinding]]:
    found: list[Directive] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word.startswith("--") and len(word) > 2:
            problem = _long(word[2:], rest, line, found)
        elif word.startswith("-") and len(word) > 1:
            problem = _short(word, rest, line, found)
        else:
            problem = _no_option(word, line)
        if problem:
            return found, [problem]
    return found, []


def _no_option(word: str, line: int) -> LintFinding:
    fix = "an option begins with - or --, such as --name=value"
    if word.startswith(("–", "—", "−")):
        fix = f"type two hyphens in place of the dash: --{shown(word.lstrip('–—−'))}"
    return LintFinding(
        line, "directive-refused", f"sbatch refuses {shown(word)}: no option", (fix,)
    )


def _long(text: str, rest: deque[str], line: int, found: list[Directive]) -> LintFinding | None:
    given, equals, value = text.partition("=")
    name = long_name(given)
    if name is None:
        return _unknown(given, line, rest)
    kind = argument(name)
    if kind == "none" and equals:
        return _refused(line, f"--{given} takes no value", f"#SBATCH --{name}")
    if kind == "required" and not equals:
        if not rest:
            return _refused(line, f"--{given} needs a value", f"#SBATCH --{name}=…")
        value = rest.popleft()
        if value == "=" or value.startswith("="):
            return _refused(line, f"there is a space before = in --{given} =", f"--{name}=…")
    found.append(Directive(line, name, value))
    return None


def _unknown(given: str, line: int, rest: deque[str]) -> LintFinding | None:
    """Return a finding for an unknown option, unless it may be one of a plugin.

    The word after such an option may be its value, and is skipped.
    """
    if given in SRUN_ONLY:
        return LintFinding(
            line,
            "unknown-option",
            f"sbatch refuses --{given}",
            (f"type {SRUN_ONLY[given]}",),
        )
    meant = similar(given)
    if meant:
        return LintFinding(
            line,
            "unknown-option",
            f"sbatch has no option --{shown(given)}",
            tuple(f"type --{name}" for name in meant),
        )
    if rest and not rest[0].startswith("-"):
        rest.popleft()
    return None


def _short(word: str, rest: deque[str], line: int, found: list[Directive]) -> LintFinding | None:
    """Read one or several short options, as in -Hv or -N2."""
    for index, letter in enumerate(word[1:], 1):
        name = SHORT.get(letter)
        if name is None:
            fix = "one that sbatch --help lists"
            return _refused(line, f"sbatch has no option -{shown(letter)}", fix)
        if argument(name) == "required":
            wrong = _short_value(letter, word[index + 1 :], word, rest, line)
            if not wrong:
                value = word[index + 1 :] or rest.popleft()
                found.append(Directive(line, name, value))
            return wrong
        found.append(Directive(line, name, ""))
        if argument(name) == "optional":
            break
    return None


def _short_value(
    letter: str, value: str, word: str, rest: deque[str], line: int
) -> LintFinding | None:
    if "=" in word and long_name(word[1:].partition("=")[0]):
        return _refused(line, f"{shown(word)} has one hyphen", f"-{shown(word)}")
    if value.startswith("="):
        fixes = (f"-{letter} {shown(value[1:])}", f"--{SHORT[letter]}{shown(value)}")
        return _refused(line, f"the = in {shown(word)} is read as part of the value", *fixes)
    if not value and not rest:
        return _refused(line, f"-{letter} needs a value", f"#SBATCH --{SHORT[letter]}=…")
    return None


def _refused(line: int, why: str, *fixes: str) -> LintFinding:
    return LintFinding(
        line,
        "directive-refused",
        f"sbatch refuses this line: {why}",
        tuple(f"type {fix}" for fix in fixes),
    )
