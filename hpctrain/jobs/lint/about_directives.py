"""Rules on the #SBATCH lines that Slurm ignores, refuses or reads in another way."""

import difflib
import re
from collections.abc import Iterator

from hpctrain.jobs.lint.directives import Directive
from hpctrain.jobs.lint.findings import Finding, shown
from hpctrain.jobs.lint.job import Job
from hpctrain.jobs.lint.options import long_name
from hpctrain.jobs.lint.units import megabytes, seconds, signal_request

__all__ = ["RULES"]

_VARIABLE = re.compile(r"\$(\w+|\{|\()")
_PATTERN = re.compile(r"%(%|\d*([A-Za-z]))")
# sbatch(1) and srun(1), FILENAME PATTERN, of all releases to 25.05.
_PATTERNS = frozenset("AabJjNnstuxUW")
# "# sbatch --x job.sh" is an example of a command, and not meant.
_ALMOST = re.compile(r"(?:# ?([A-Z]{4,9})|#([a-z]{4,9}))[ \t]+--?([A-Za-z][\w-]*)(?=[= \t]|\Z)")
_FILES = ("output", "error", "input")
# A job of fewer megabytes does not start Python.
_LEAST_MEGABYTES = 129


def refused(job: Job) -> Iterator[Finding]:
    """Report the lines that the parser of #SBATCH lines refuses (sbatch(1))."""
    yield from job.refused


def shebang(job: Job) -> Iterator[Finding]:
    """Find a script without #!, which sbatch refuses (DESCRIPTION; tested with 22.05)."""
    if not job.text.startswith("#!"):
        yield Finding(
            1,
            "no-shebang",
            "sbatch refuses a script whose first line does not begin with #!",
            ("put #!/bin/bash into the first line, at its very beginning",),
        )


def ignored(job: Job) -> Iterator[Finding]:
    """Find directives after the first command, or without #SBATCH at the start of the line.

    ##SBATCH is accepted, as it is used to disable a directive. Source: sbatch(1), DESCRIPTION.
    """
    lines = job.text.split("\n")
    for comment in job.comments:
        if not comment.alone:
            continue
        late = comment.line > job.end and re.match(r"#SBATCH\s+-", comment.text)
        if late:
            yield Finding(
                comment.line,
                "directive-ignored",
                f"Slurm reads no #SBATCH line after the first command, in line {job.end}",
                ("move it up, before all commands",),
            )
            continue
        indented = not lines[comment.line - 1].startswith("#")
        if comment.line < job.end and _meant(comment.text, indented):
            yield Finding(
                comment.line,
                "directive-ignored",
                f"for Slurm {shown(comment.text)} is a comment: a directive begins with #SBATCH, "
                "without a space before or in it",
                ("type #SBATCH at the beginning of the line",),
            )


def _meant(text: str, indented: bool) -> bool:
    """Check whether a comment is probably a misspelt directive."""
    if re.match(r"#SBATCH[\s-]", text):
        return indented
    match = _ALMOST.match(text)
    if not match:
        return False
    mark = (match[1] or match[2]).upper()
    near = difflib.SequenceMatcher(None, mark, "SBATCH").ratio() > 0.8
    return near and (len(match[3]) == 1 or long_name(match[3]) is not None)


def twice(job: Job) -> Iterator[Finding]:
    """Find options with several values: sbatch takes the last one without a warning.

    Source: sbatch(1); tested with 22.05.
    """
    for component in job.components:
        first: dict[str, Directive] = {}
        for one in component.directives:
            before = first.setdefault(one.name, one)
            if before.value != one.value:
                yield Finding(
                    one.line,
                    "option-twice",
                    f"--{one.name} is {shown(before.value)} in line {before.line} and "
                    f"{shown(one.value)} here; Slurm takes the last one without a word",
                    (f"keep one of lines {before.line} and {one.line}",),
                )


def variable(job: Job) -> Iterator[Finding]:
    """Find variables and other shell syntax, which sbatch does not expand (DESCRIPTION)."""
    for component in job.components:
        for one in component.directives:
            if one.name != "wrap" and _VARIABLE.search(one.value):
                yield Finding(
                    one.line,
                    "directive-variable",
                    f"no shell reads a #SBATCH line: {shown(one.value)} is taken as it stands",
                    (
                        "write the value itself (in file names %u is the user, %j the job, %x its "
                        "name)",
                        f"give it on the command line: sbatch --{one.name}=…",
                    ),
                )
            elif one.name in (*_FILES, "chdir") and re.match(r"~[\w.-]*(/|\Z)", one.value):
                yield Finding(
                    one.line,
                    "directive-variable",
                    f"no shell reads a #SBATCH line: ~ in {shown(one.value)} is a folder's name",
                    ("write the whole path",),
                )


def value(job: Job) -> Iterator[Finding]:
    """Find values that sbatch refuses (sbatch(1), --time and --signal)."""
    for component in job.components:
        time, asked = component.get("time"), component.get("signal")
        if time and seconds(time.value) is None:
            yield Finding(
                time.line,
                "directive-refused",
                f"sbatch refuses --time={shown(time.value)}",
                ("type minutes, hours:minutes:seconds or days-hours, such as --time=24:00:00",),
            )
        if asked and signal_request(asked.value) is None:
            yield Finding(
                asked.line,
                "directive-refused",
                f"sbatch refuses --signal={shown(asked.value)}",
                (
                    "type --signal=B:USR2@120: B: for the batch shell alone, a signal, and at most "
                    "65535 seconds",
                ),
            )


def pattern(job: Job) -> Iterator[Finding]:
    """Find unknown patterns, which stay unchanged in the name of the file.

    Source: sbatch(1), FILENAME PATTERN; tested with 22.05.
    """
    for component in job.components:
        for one in component.directives:
            if one.name not in _FILES or "\\" in one.value:
                continue
            unknown = [m[0] for m in _PATTERN.finditer(one.value) if m[2] not in {*_PATTERNS, None}]
            if unknown:
                yield Finding(
                    one.line,
                    "unknown-pattern",
                    f"Slurm knows no {unknown[0]}, so it stays in the name of the file",
                    (
                        "type %j for the job's number, %x for its name, %A_%a for an array's task",
                        "type %% for a percent sign",
                    ),
                )


def log_folder(job: Job) -> Iterator[Finding]:
    """Find missing log folders: Slurm creates none, and the job fails before its first line.

    Source: sbatch(1), --output. Tested with 22.05: the job is FAILED with 0:53 at once, and writes
    nothing. Only relative paths are checked, as others may be on another machine.
    """
    for component in job.components:
        if component.get("chdir"):
            continue
        for name in ("output", "error"):
            one = component.get(name)
            folder, slash, _ = one.value.rpartition("/") if one else ("", "", "")
            if not one or not slash or one.value.startswith(("/", "~")) or "$" in one.value:
                continue
            # What Slurm fills in is not known here; the folder above it is.
            known = re.split(r"/?[^/]*%", folder)[0]
            if "\0" not in known and not (job.folder / known).is_dir():
                yield Finding(
                    one.line,
                    "log-folder-missing",
                    f"there is no folder {shown(known)} where the job is submitted: Slurm makes "
                    "none, and the job fails before its first line without a log",
                    (f"mkdir -p {shown(known)} before sbatch; in the script it comes too late",),
                )
            elif re.search(r"%\d*[jA]", folder):
                yield Finding(
                    one.line,
                    "log-folder-missing",
                    f"the folder {shown(folder)} cannot be there before the job has its number: "
                    "Slurm makes none, and the job fails before its first line without a log",
                    (f"type --{name}={shown(known)}{'/' if known else ''}%x-%j.log",),
                )


def memory(job: Job) -> Iterator[Finding]:
    """Find wrong memory options: a --mem in megabytes that is too small, or several options.

    Source: sbatch(1), --mem.
    """
    names = ("mem", "mem-per-cpu", "mem-per-gpu")
    for component in job.components:
        given = [one for name in names if (one := component.get(name))]
        if len(given) > 1:
            several = " and ".join(f"--{one.name}" for one in given)
            yield Finding(
                max(one.line for one in given),
                "memory-twice",
                f"sbatch refuses {several} together: one is of a node, the others of a CPU or GPU",
                ("keep one; --mem is the memory of all tasks of a node together",),
            )
        for one in given:
            amount = megabytes(one.value)
            small = amount and not amount[1] and 0 < amount[0] < _LEAST_MEGABYTES
            if one.name == "mem" and amount and small:
                yield Finding(
                    one.line,
                    "memory-in-megabytes",
                    f"--mem={one.value} is {one.value} megabytes, for all tasks of a node",
                    (f"type --mem={one.value}G",),
                )


def export(job: Job) -> Iterator[Finding]:
    """Find a value in --export that is cut at a comma (sbatch(1), --export)."""
    for component in job.components:
        one = component.get("export")
        for item in one.value.split(",") if one else ():
            if one and not re.match(r"[A-Za-z_]\w*(=|\Z)", item.strip("'\" ")) and item.strip():
                yield Finding(
                    one.line,
                    "export-cut",
                    f"--export is cut at commas: {shown(item)} is read as a variable's name",
                    ("export the variable in the script: export NAME='a,b'",),
                )
                break


RULES = (
    *(refused, shebang, ignored, twice, variable, value, pattern),
    *(log_folder, memory, export),
)
