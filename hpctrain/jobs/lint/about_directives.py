"""Rules on the #SBATCH lines that Slurm ignores, refuses or reads in another way."""

import difflib
import re
from collections.abc import Iterator

from hpctrain.jobs.lint.directive_reader import Directive
from hpctrain.jobs.lint.lint_finding import LintFinding, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.option_values import megabytes, seconds, signal_request
from hpctrain.jobs.lint.sbatch_options import long_name

__all__ = ["RULES"]

_VARIABLE = re.compile(r"\$(\w+|\{|\()")
_PATTERN = re.compile(r"%(%|\d*([A-Za-z]))")
# sbatch(1) and srun(1), FILENAME PATTERN, of all releases to 25.05.
_PATTERNS = frozenset("AabJjNnstuxUW")
# "# sbatch --x script.sh" is an example of a command, and no directive.
_ALMOST = re.compile(r"(?:# ?([A-Z]{4,9})|#([a-z]{4,9}))[ \t]+--?([A-Za-z][\w-]*)(?=[= \t]|\Z)")
_FILES = ("output", "error", "input")
# A job of fewer megabytes does not start Python.
_LEAST_MEGABYTES = 129


def refused(script: LintedScript) -> Iterator[LintFinding]:
    """Report the lines that the parser of #SBATCH lines refuses (sbatch(1))."""
    yield from script.refused


def shebang(script: LintedScript) -> Iterator[LintFinding]:
    """Find a script without #!, which sbatch refuses (DESCRIPTION; tested with 22.05)."""
    if not script.text.startswith("#!"):
        yield LintFinding(
            1,
            "no-shebang",
            "sbatch refuses a script whose first line does not begin with #!",
            ("put #!/bin/bash into the first line, at its very beginning",),
        )


def ignored(script: LintedScript) -> Iterator[LintFinding]:
    """Find directives after the first command, or without #SBATCH at the start of the line.

    ##SBATCH is accepted, as it is used to disable a directive. Source: sbatch(1), DESCRIPTION.
    """
    lines = script.text.split("\n")
    for comment in script.comments:
        if not comment.alone:
            continue
        late = comment.line > script.end and re.match(r"#SBATCH\s+-", comment.text)
        if late:
            yield LintFinding(
                comment.line,
                "directive-ignored",
                f"Slurm reads no #SBATCH line after the first command, in line {script.end}",
                ("move it up, before all commands",),
            )
            continue
        indented = not lines[comment.line - 1].startswith("#")
        if comment.line < script.end and _is_misspelt_directive(comment.text, indented):
            yield LintFinding(
                comment.line,
                "directive-ignored",
                f"for Slurm {shown(comment.text)} is a comment: a directive begins with #SBATCH, "
                "without a space before or in it",
                ("type #SBATCH at the beginning of the line",),
            )


def _is_misspelt_directive(text: str, indented: bool) -> bool:
    """Check whether a comment is probably a misspelt directive."""
    if re.match(r"#SBATCH[\s-]", text):
        return indented
    match = _ALMOST.match(text)
    if not match:
        return False
    mark = (match[1] or match[2]).upper()
    near = difflib.SequenceMatcher(None, mark, "SBATCH").ratio() > 0.8
    return near and (len(match[3]) == 1 or long_name(match[3]) is not None)


def twice(script: LintedScript) -> Iterator[LintFinding]:
    """Find options with several values: sbatch takes the last one without a warning.

    Source: sbatch(1); tested with 22.05.
    """
    for component in script.components:
        first: dict[str, Directive] = {}
        for directive in component.directives:
            earlier = first.setdefault(directive.name, directive)
            if earlier.value != directive.value:
                yield LintFinding(
                    directive.line,
                    "option-twice",
                    f"--{directive.name} is {shown(earlier.value)} in line {earlier.line} and "
                    f"{shown(directive.value)} here; Slurm uses the last one without a warning",
                    (f"keep one of lines {earlier.line} and {directive.line}",),
                )


def variable(script: LintedScript) -> Iterator[LintFinding]:
    """Find variables and other shell syntax, which sbatch does not expand (DESCRIPTION)."""
    for component in script.components:
        for directive in component.directives:
            if directive.name != "wrap" and _VARIABLE.search(directive.value):
                yield LintFinding(
                    directive.line,
                    "directive-variable",
                    f"no shell reads a #SBATCH line: {shown(directive.value)} is used literally",
                    (
                        "write the value itself (in file names %u is the user, %j the job, %x its "
                        "name)",
                        f"give it on the command line: sbatch --{directive.name}=…",
                    ),
                )
            elif directive.name in (*_FILES, "chdir") and re.match(
                r"~[\w.-]*(/|\Z)", directive.value
            ):
                yield LintFinding(
                    directive.line,
                    "directive-variable",
                    f"no shell reads a #SBATCH line: ~ in {shown(directive.value)} stays a ~",
                    ("write the whole path",),
                )


def value(script: LintedScript) -> Iterator[LintFinding]:
    """Find values that sbatch refuses (sbatch(1), --time and --signal)."""
    for component in script.components:
        time, signal = component.get("time"), component.get("signal")
        if time and seconds(time.value) is None:
            yield LintFinding(
                time.line,
                "directive-refused",
                f"sbatch refuses --time={shown(time.value)}",
                ("type minutes, hours:minutes:seconds or days-hours, such as --time=24:00:00",),
            )
        if signal and signal_request(signal.value) is None:
            yield LintFinding(
                signal.line,
                "directive-refused",
                f"sbatch refuses --signal={shown(signal.value)}",
                (
                    "type --signal=B:USR2@120: B: for the batch shell alone, a signal, and at most "
                    "65535 seconds",
                ),
            )


def pattern(script: LintedScript) -> Iterator[LintFinding]:
    """Find unknown patterns, which stay unchanged in the name of the file.

    Source: sbatch(1), FILENAME PATTERN; tested with 22.05.
    """
    for component in script.components:
        for directive in component.directives:
            if directive.name not in _FILES or "\\" in directive.value:
                continue
            unknown = [
                m[0] for m in _PATTERN.finditer(directive.value) if m[2] not in {*_PATTERNS, None}
            ]
            if unknown:
                yield LintFinding(
                    directive.line,
                    "unknown-pattern",
                    f"{unknown[0]} has no meaning for Slurm, so it stays in the name of the file",
                    (
                        "type %j for the job's number, %x for its name, %A_%a for an array's task",
                        "type %% for a percent sign",
                    ),
                )


def log_folder(script: LintedScript) -> Iterator[LintFinding]:
    """Find missing log folders: Slurm creates none, and the job fails before its first line.

    Source: sbatch(1), --output. Tested with 22.05: the job is FAILED with 0:53 at once, and writes
    nothing. Only relative paths are checked, as others may be on another machine.
    """
    for component in script.components:
        if component.get("chdir"):
            continue
        for name in ("output", "error"):
            directive = component.get(name)
            folder, slash, _ = directive.value.rpartition("/") if directive else ("", "", "")
            if (
                not directive
                or not slash
                or directive.value.startswith(("/", "~"))
                or "$" in directive.value
            ):
                continue
            # What Slurm fills in is not known here; the folder above it is.
            known = re.split(r"/?[^/]*%", folder)[0]
            if "\0" not in known and not (script.folder / known).is_dir():
                yield LintFinding(
                    directive.line,
                    "log-folder-missing",
                    f"there is no folder {shown(known)} where the job is submitted: Slurm makes "
                    "none, and the job fails before its first line without a log",
                    (f"mkdir -p {shown(known)} before sbatch; in the script it comes too late",),
                )
            elif re.search(r"%\d*[jA]", folder):
                yield LintFinding(
                    directive.line,
                    "log-folder-missing",
                    f"the folder {shown(folder)} cannot be there before the job has its number: "
                    "Slurm makes none, and the job fails before its first line without a log",
                    (f"type --{name}={shown(known)}{'/' if known else ''}%x-%j.log",),
                )


def memory(script: LintedScript) -> Iterator[LintFinding]:
    """Find wrong memory options: a --mem in megabytes that is too small, or several options.

    Source: sbatch(1), --mem.
    """
    names = ("mem", "mem-per-cpu", "mem-per-gpu")
    for component in script.components:
        given = [option for name in names if (option := component.get(name))]
        if len(given) > 1:
            several = " and ".join(f"--{option.name}" for option in given)
            yield LintFinding(
                max(option.line for option in given),
                "memory-twice",
                f"sbatch refuses {several} together: one is of a node, the others of a CPU or GPU",
                ("keep one; --mem is the memory of all tasks of a node together",),
            )
        for option in given:
            amount = megabytes(option.value)
            small = amount and not amount[1] and 0 < amount[0] < _LEAST_MEGABYTES
            if option.name == "mem" and amount and small:
                yield LintFinding(
                    option.line,
                    "memory-in-megabytes",
                    f"--mem={option.value} is {option.value} megabytes, for all tasks of a node",
                    (f"type --mem={option.value}G",),
                )


def export(script: LintedScript) -> Iterator[LintFinding]:
    """Find a value in --export that is cut at a comma (sbatch(1), --export)."""
    for component in script.components:
        option = component.get("export")
        for item in option.value.split(",") if option else ():
            if option and not re.match(r"[A-Za-z_]\w*(=|\Z)", item.strip("'\" ")) and item.strip():
                yield LintFinding(
                    option.line,
                    "export-cut",
                    f"--export is cut at commas: {shown(item)} is read as a variable's name",
                    ("export the variable in the script: export NAME='a,b'",),
                )
                break


RULES = (
    *(refused, shebang, ignored, twice, variable, value, pattern),
    *(log_folder, memory, export),
)
