"""The #SBATCH lines of a script, and the rules on what Slurm ignores, refuses or reads otherwise.

sbatch(1), DESCRIPTION: they end at the first line that is neither a comment nor white space. The
treatment of quotes and # was tested with sbatch 22.05. A line that sbatch ignores and an option
that is misspelt are reported, and read as a person means them: what else is wrong is found at once.
"""

import itertools
import re
import shlex
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.sbatch_options import SHORT, SRUN_ONLY, VALUED, long_names, similar
from hpctrain.jobs.units import slurm_seconds

__all__ = ["SIGNALS", "Directives", "Option", "cut_export", "signal_request"]

#: Names of signals by number, and EXIT, as for `trap`.
SIGNALS = {"0": "EXIT"} | {str(one.value): one.name[3:] for one in signal.Signals}
_SIGNAL = re.compile(r"(?:([RB]+):)?(\w+)(?:@([0-9]{1,5}))?\Z")
_MARK = "#SBATCH"
# More than a script has; further lines, and the rest of a longer one, are not looked at.
_MOST_LINES, _MOST_CHARACTERS = 500, 2_000
# "# sbatch --x script.sh" is an example of a command, and no directive, and so is ##SBATCH.
_MISSPELT = re.compile(
    r"\s+#SBATCH(?=[\s-])|"
    r"(?:# (?:S[BACTH]{4,5}|BATCH)|#(?!SBATCH)(?i:S[BACTH]{4,5}|BATCH))(?=\s+--?[A-Za-z])"
)
_EXPORTED = re.compile(r"['\" ]*([A-Za-z_]\w*(=|['\" ]*\Z)|\Z)")
_PATHS = ("output", "error", "input", "chdir")
# A job of fewer megabytes does not start Python.
_LEAST_MEGABYTES = 129

# Number of a line, its options, and if Slurm ignores it, reason and fix.
_Marked = tuple[int, str, *tuple[str, ...]]


class Option(NamedTuple):
    """An option in a #SBATCH line.

    Attributes:
        line: line number in the script, from 1.
        name: long name, without hyphens.
        value: value as sbatch reads it, without quotes; empty if there is none.
    """

    line: int
    name: str
    value: str


class Directives:
    """The #SBATCH lines of a script.

    Attributes:
        parts: the last option of each name; several parts only for a heterogeneous job.
        found: what is wrong with the lines.
    """

    def __init__(self, lines: list[str], comments: list[tuple[int, str]]) -> None:
        self.parts: list[dict[str, Option]] = [{}]
        self.found: list[Found] = []
        for line, text, *ignored in itertools.islice(_marked(lines, comments), _MOST_LINES):
            self._line = line
            if ignored:
                self._report("directive-ignored", *ignored)
            self._words = deque(self._split(text[:_MOST_CHARACTERS].rstrip("\\")))
            if self._words and self._words[0] in ("hetjob", "packjob"):
                self.parts.append({})
                continue
            while self._words:
                self._take(self._words.popleft())

    def _report(self, rule: str, reason: str, *fixes: str) -> None:
        self.found.append((self._line, rule, reason, *fixes))

    def _refuse(self, why: str, fix: str) -> None:
        self._report("directive-refused", f"sbatch refuses this line: {why}", f"type {fix}")

    def _split(self, text: str) -> list[str]:
        try:
            return shlex.split(text, comments=True)
        except ValueError:
            quote = "the other quote; a #SBATCH line ends with its line"
            self._refuse(f"a quote in {shown(text.strip())} is not closed", quote)
            return re.split("['\"]", text)[0].split()

    def _take(self, word: str) -> None:
        """Take a word, and the next one if it is the value."""
        given, equals, value = word.lstrip("-").partition("=")
        if not re.match(r"--?[^-]", word):
            dashes = shown(given.lstrip("–—−"))
            fix = f"--{dashes}, with two hyphens" if dashes != given else "--NAME=VALUE"
            self._refuse(f"{shown(word)} is no option", fix)
            self._words.clear()
            return
        if word[1] != "-" and equals and long_names(given):
            self._refuse(f"{shown(word)} has one hyphen", f"-{shown(word)}")
        elif word[1] != "-":
            given, equals, value = SHORT.get(word[1], word[1]), "", word[2:]
            if value and given in SHORT.values() and given not in VALUED:
                self._words.appendleft(f"-{value}")
                value = ""
        name = self._named(given)
        if name in VALUED and not equals:
            value = value or (self._words.popleft() if self._words else "")
            if not value or value[0] == "=":
                why = "needs a value" if not value else "has a = that is read as part of its value"
                self._refuse(f"--{name} {why}", f"{_MARK} --{name}=VALUE")
                value = value[1:] or (self._words.popleft() if self._words else "")
        if name:
            self._add(Option(self._line, name, value))

    def _named(self, given: str) -> str:
        """Return the option that a person means; empty for one of a plugin, or for several."""
        meant = long_names(given)
        if len(meant) == 1:
            return meant[0]
        if len(given) == 1:
            self._refuse(f"sbatch has no option -{shown(given)}", "one that sbatch --help lists")
            return ""
        meant = meant or similar(given)
        fixes = [f"type --{name}" for name in meant]
        if given in SRUN_ONLY.split():
            fixes, meant = [f"type srun --{given} …"], []
        if fixes:
            self._report("unknown-option", f"sbatch has no option --{shown(given)}", *fixes)
        elif self._words and not self._words[0].startswith("-"):
            self._words.popleft()
        return meant[0] if len(meant) == 1 else ""

    def _add(self, option: Option) -> None:
        """Add an option, and report what is wrong with it by its section of sbatch(1)."""
        _, name, value = option
        text = f"--{name}={shown(value)}"
        old = self.parts[-1].get(name, option)
        self.parts[-1][name] = option
        # Each --mail-type adds to those before: arg_set_mail_type in slurm_opt.c.
        if old.value != value and name != "mail-type":
            both = f"{shown(old.value)} in line {old.line} and {shown(value)} here"
            reason = f"--{name} is {both}; Slurm uses the last one without a warning"
            self._report("option-twice", reason, f"keep one of lines {old.line} and {option.line}")
        unlimited = value.lower() in ("infinite", "unlimited", "-1", "0")
        if name == "time" and slurm_seconds(value) is None and not unlimited:
            self._refuse(text, "days-hours:minutes:seconds or minutes, such as --time=24:00:00")
        if name == "signal" and not signal_request(value):
            self._refuse(text, "--signal=B:USR2@120: a signal, and at most 65535 seconds")
        if (value[:1] == "~" and name in _PATHS) or re.search(r"\$[\w{(]", value):
            reason = f"no shell reads a #SBATCH line: {text} is used literally"
            fix = "write the value itself (in file names %u is the user, %j the job, %x its name)"
            self._report("directive-variable", reason, fix, f"type sbatch --{name}=… SCRIPT")
        small = name == "mem" and re.fullmatch("[0-9]{1,3}", value)
        if small and 0 < int(value) < _LEAST_MEGABYTES:
            reason = f"--mem={value} is {value} megabytes, for all tasks of a node"
            self._report("memory-in-megabytes", reason, f"type --mem={value}G")
        if name == "export" and (cut := cut_export(value)):
            self._report("export-cut", *cut)

    def missing_log_folders(self, above: Path) -> Iterator[Found]:
        """Yield missing log folders: Slurm creates none, and the job fails before its first line.

        Source: sbatch(1), --output. Tested with 22.05: the job is FAILED with 0:53 at once, and
        writes nothing. Only relative paths are checked, as others may be on another machine.
        """
        for options in self.parts if not any("chdir" in part for part in self.parts) else ():
            for name in {"output", "error"} & options.keys():
                folder, slash, _ = options[name].value.rpartition("/")
                # What Slurm fills in is not known here; the folder above it is.
                known = re.split(r"/?[^/]*[%$\0]", folder)[0]
                fix = f"mkdir -p {shown(known)} before sbatch; in the script it comes too late"
                if (above / known).is_dir():
                    fix = f"type --{name}={shown(known)}{'/' if known else ''}%x-%j.log"
                    slash = slash if re.search(r"%\d*[jA]", folder) else ""
                if slash and not re.match("[/~$]", folder or "/"):
                    reason = f"Slurm makes no folder {shown(folder)}: the job fails without a log"
                    yield options[name].line, "log-folder-missing", reason, fix


def cut_export(value: str) -> tuple[str, str] | None:
    """Return the reason and the fix if a value of --export has a comma in a variable's value."""
    cut = [one for one in value.split(",") if not _EXPORTED.match(one)]
    if not cut:
        return None
    reason = f"--export is cut at commas: {shown(cut[0])} is read as a variable's name"
    return reason, "export it in the script: export NAME='a,b'"


def signal_request(text: str) -> tuple[bool, str, int] | None:
    """Parse --signal=[{R|B}:]SIGNAL[@SECONDS]; return None if sbatch would refuse it.

    Returns:
        Whether only the batch shell gets the signal, its name without SIG, and the seconds (60 by
        default) before the end of the time limit.
    """
    match = _SIGNAL.match(text)
    if not match:
        return None
    name, seconds = match[2].upper().removeprefix("SIG"), int(match[3] or 60)
    name = SIGNALS.get(name, name)
    valid = name in SIGNALS.values() and name != "EXIT" and seconds <= 65535
    return ("B" in (match[1] or ""), name, seconds) if valid else None


def _marked(lines: list[str], comments: list[tuple[int, str]]) -> Iterator[_Marked]:
    """Yield number and options of each #SBATCH line; for one that Slurm ignores, reason and fix."""
    code = (at for at, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#")
    end = next(code, len(lines) + 1)
    for number, line in enumerate(lines[: end - 1], 1):
        if line.startswith(_MARK):
            yield number, line[len(_MARK) :]
        elif match := _MISSPELT.match(line):
            reason = f"for Slurm {shown(line.strip())} is a comment, as its mark is not {_MARK}"
            yield number, line[match.end() :], reason, f"type {_MARK} at the beginning of the line"
    before, first = ["", *lines, ""][end - 1 : end + 1]
    if before.startswith(_MARK) and before.endswith("\\") and first.lstrip().startswith("-"):
        reason = "a backslash does not continue a #SBATCH line, so this is a command"
        yield end, first, reason, f"begin the line with {_MARK}"
    for number, comment in comments:
        if number > end and re.match(rf"{_MARK}\s+-", comment):
            reason = f"Slurm reads no {_MARK} line after the first command, in line {end}"
            yield number, comment[len(_MARK) :], reason, "move it up, before all commands"
