"""The #SBATCH lines of a script, and the rules on what Slurm ignores or reads otherwise.

sbatch(1), DESCRIPTION: they end at the first line that is neither a comment nor white space. The
treatment of quotes and # was tested with sbatch 22.05. A line that sbatch ignores is reported, and
read as a person means it: what else is wrong is found at once. What sbatch itself refuses, such as
an unknown option, is left to sbatch: it tells so before the job is in the queue.
"""

import itertools
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpctrain.jobs.lint.lint_finding import Found, shown

__all__ = ["SHORT", "SIGNALS", "Option", "missing_log_folders", "read", "signal_request"]

#: Long names of the short options with a value that sbatch and srun have in common.
SHORT = {
    "A": "account", "c": "cpus-per-task", "C": "constraint", "d": "dependency", "D": "chdir",
    "e": "error", "G": "gpus", "i": "input", "J": "job-name", "m": "distribution", "n": "ntasks",
    "N": "nodes", "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist",
    "x": "exclude",
}  # fmt: skip
#: Names of signals by number, and EXIT, as for `trap`.
SIGNALS = {"0": "EXIT"} | {str(one.value): one.name[3:] for one in signal.Signals}
_SIGNAL = re.compile(r"(?:([RB]+):)?(\w+)(?:@([0-9]{1,5}))?\Z")
_MARK = "#SBATCH"
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
_Marked = tuple[int, str, str, str]


class Option(NamedTuple):
    """An option in a #SBATCH line.

    Attributes:
        line: line number in the script, from 1.
        value: value as sbatch reads it, without quotes; empty if there is none.
    """

    line: int
    value: str


def read(
    lines: list[str], comments: list[tuple[int, str]]
) -> tuple[list[dict[str, Option]], list[Found]]:
    """Return the last option of each name, and what is wrong with the lines.

    There is a table of options for each part of a heterogeneous job; else only one.

    Args:
        lines: lines of the script.
        comments: line numbers and texts of its comments.
    """
    parts: list[dict[str, Option]] = [{}]
    found: list[Found] = []
    for line, text, ignored, fix in _marked(lines, comments):
        if ignored:
            found.append((line, "directive-ignored", ignored, fix))
        words = _words(text)
        if words[:1] in (["hetjob"], ["packjob"]):
            parts.append({})
        for word, following in itertools.pairwise([*words, "-"]):
            name, value = _option(word, "" if following.startswith("-") else following)
            if name:
                found += _findings(line, name, value, parts[-1].get(name))
                parts[-1][name] = Option(line, value)
    return parts, found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.rstrip("\\"), comments=True)
    except ValueError:  # a quote that is not closed; sbatch refuses the line
        return []


def _option(word: str, following: str) -> tuple[str, str]:
    """Return name and value of an option, whose value may be the next word; empty for no option."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        name = f"n{name}" if name in ("tasks", "tasks-per-node") else name
        return name, value if equals else following
    if word.startswith("-"):
        return SHORT.get(word[1:2], ""), word[2:] or following
    return "", ""


def _findings(line: int, name: str, value: str, old: Option | None) -> Iterator[Found]:
    """Yield what is wrong with an option, by its section of sbatch(1)."""
    text = f"--{name}={shown(value)}"
    if old and old.value != value:
        both = f"{shown(old.value)} in line {old.line} and {shown(value)} here"
        reason = f"--{name} is {both}; Slurm uses the last one without a warning"
        yield line, "option-twice", reason, f"keep one of lines {old.line} and {line}"
    if (value[:1] == "~" and name in _PATHS) or re.search(r"\$[\w{(]", value):
        reason = f"no shell reads a #SBATCH line: {text} is used literally"
        fix = "write the value itself (in file names %u is the user, %j the job, %x its name)"
        yield line, "directive-variable", reason, fix, f"type sbatch --{name}=… SCRIPT"
    small = name == "mem" and re.fullmatch("[0-9]{1,3}", value)
    if small and 0 < int(value) < _LEAST_MEGABYTES:
        reason = f"--mem={value} is {value} megabytes, for all tasks of a node"
        yield line, "memory-in-megabytes", reason, f"type --mem={value}G"
    cut = [one for one in value.split(",") if name == "export" and not _EXPORTED.match(one)]
    if cut:
        reason = f"--export is cut at commas: {shown(cut[0])} is read as a variable's name"
        yield line, "export-cut", reason, "export it in the script: export NAME='a,b'"


def missing_log_folders(parts: list[dict[str, Option]], above: Path) -> Iterator[Found]:
    """Yield missing log folders: Slurm creates none, and the job fails before its first line.

    Source: sbatch(1), --output. Tested with 22.05: the job is FAILED with 0:53 at once, and
    writes nothing. Only relative paths are checked, as others may be on another machine.
    """
    for options in parts if not any("chdir" in part for part in parts) else ():
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


def signal_request(text: str) -> tuple[bool, str, int] | None:
    """Parse --signal=[{R|B}:]SIGNAL[@SECONDS]; return None if sbatch would refuse it.

    Returns:
        Whether only the batch shell gets the signal, its name without SIG, and the seconds (60 by
        default) before the end of the time limit.
    """
    match = _SIGNAL.match(text)
    if not match:
        return None
    name = match[2].upper().removeprefix("SIG")
    name = SIGNALS.get(name, name)
    known = name in SIGNALS.values() and name != "EXIT"
    return ("B" in (match[1] or ""), name, int(match[3] or 60)) if known else None


def _marked(lines: list[str], comments: list[tuple[int, str]]) -> Iterator[_Marked]:
    """Yield number and options of each #SBATCH line; for one that Slurm ignores, reason and fix."""
    code = (at for at, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#")
    end = next(code, len(lines) + 1)
    for number, line in enumerate(lines[: end - 1], 1):
        if line.startswith(_MARK):
            yield number, line[len(_MARK) :], "", ""
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
