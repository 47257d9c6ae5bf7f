"""Rules on the #SBATCH lines that Slurm ignores, refuses or reads in another way."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.directives import MARK
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.option_values import megabytes, seconds, signal_request

_VARIABLE = re.compile(r"\$(\w+|\{|\()")
_HOME = re.compile(r"~[\w.-]*(/|\Z)")
_PATTERN = re.compile(r"%(%|\d*([A-Za-z]))")
# sbatch(1) and srun(1), FILENAME PATTERN, of all releases to 25.05.
_PATTERNS = frozenset("AabJjNnstuxUW")
# "# sbatch --x script.sh" is an example of a command, and no directive, and so is ##SBATCH.
_MISSPELT = re.compile(
    r"\s+#SBATCH[\s-]|"
    r"(?:# (?:S[BACTH]{4,5}|BATCH)|#(?!SBATCH)(?i:S[BACTH]{4,5}|BATCH))\s+--?[A-Za-z]"
)
_FILES = ("output", "error", "input")
# A job of fewer megabytes does not start Python.
_LEAST_MEGABYTES = 129


def no_shebang(script: LintedScript) -> Iterator[Found]:
    """Find a script without #!, which sbatch refuses (DESCRIPTION; tested with 22.05)."""
    if not script.text.startswith("#!"):
        reason = "sbatch refuses a script whose first line does not begin with #!"
        yield 1, reason, "put #!/bin/bash into the first line, at its very beginning"


def dos_line_ends(script: LintedScript) -> Iterator[Found]:
    r"""Find \r\n, which sbatch refuses (tested with 22.05)."""
    carriage = script.text.find("\r\n")
    if carriage >= 0:
        line = script.text.count("\n", 0, carriage) + 1
        yield line, "lines end in \\r\\n, and sbatch refuses the script", "sed -i 's/\\r$//' SCRIPT"


def directive_cut(script: LintedScript) -> Iterator[Found]:
    """Report a # in a value (tested with 22.05)."""
    yield from script.directives.problems["directive-cut"]


def unknown_option(script: LintedScript) -> Iterator[Found]:
    """Report options that sbatch does not have (sbatch(1))."""
    yield from script.directives.problems["unknown-option"]


def directive_refused(script: LintedScript) -> Iterator[Found]:
    """Report lines and values that sbatch refuses (sbatch(1), --time and --signal)."""
    yield from script.directives.problems["directive-refused"]
    for line, name, value in script.all_options:
        if name == "time" and seconds(value) is None:
            fix = "type minutes, hours:minutes:seconds or days-hours, such as --time=24:00:00"
            yield line, f"sbatch refuses --time={shown(value)}", fix
        if name == "signal" and signal_request(value) is None:
            fix = "type --signal=B:USR2@120: a signal, and at most 65535 seconds"
            yield line, f"sbatch refuses --signal={shown(value)}", fix


def directive_ignored(script: LintedScript) -> Iterator[Found]:
    """Find directives after the first command, or without #SBATCH at the start of the line.

    Source: sbatch(1), DESCRIPTION.
    """
    end = script.directives.end
    for number, line in enumerate(script.lines[: end - 1], 1):
        if _MISSPELT.match(line):
            reason = (
                f"for Slurm {shown(line.strip())} is a comment, as it does not begin with {MARK}"
            )
            yield number, reason, "type #SBATCH at the beginning of the line"
    before, first = ["", *script.lines, ""][end - 1 : end + 1]
    if before.startswith(MARK) and before.endswith("\\") and first.lstrip().startswith("-"):
        reason = "a backslash does not continue a #SBATCH line, so this is a command"
        yield end, reason, "begin the line with #SBATCH"
    for number, comment in script.shell.comments:
        if number > end and re.match(r"#SBATCH\s+-", comment):
            reason = f"Slurm reads no #SBATCH line after the first command, in line {end}"
            yield number, reason, "move it up, before all commands"


def directive_variable(script: LintedScript) -> Iterator[Found]:
    """Find variables and other shell syntax, which sbatch does not expand (DESCRIPTION)."""
    for line, name, value in script.all_options:
        if name != "wrap" and _VARIABLE.search(value):
            reason = f"no shell reads a #SBATCH line: {shown(value)} is used literally"
            fix = "write the value itself (in file names %u is the user, %j the job, %x its name)"
            yield line, reason, fix, f"give it on the command line: sbatch --{name}=…"
        elif name in (*_FILES, "chdir") and _HOME.match(value):
            reason = f"no shell reads a #SBATCH line: ~ in {shown(value)} stays a ~"
            yield line, reason, "write the whole path"


def option_twice(script: LintedScript) -> Iterator[Found]:
    """Find options with several values: sbatch takes the last one without a warning.

    Source: sbatch(1); tested with 22.05.
    """
    for component in script.directives.components:
        first: dict[str, tuple[int, str]] = {}
        for line, name, value in component:
            earlier, old = first.setdefault(name, (line, value))
            if old != value:
                both = f"{shown(old)} in line {earlier} and {shown(value)} here"
                reason = f"--{name} is {both}; Slurm uses the last one without a warning"
                yield line, reason, f"keep one of lines {earlier} and {line}"


def unknown_pattern(script: LintedScript) -> Iterator[Found]:
    """Find unknown patterns, which stay unchanged in the name of the file.

    Source: sbatch(1), FILENAME PATTERN; tested with 22.05.
    """
    for line, name, value in script.all_options:
        if name not in _FILES or "\\" in value:
            continue
        unknown = [m[0] for m in _PATTERN.finditer(value) if m[2] not in {*_PATTERNS, None}]
        if unknown:
            reason = f"{unknown[0]} has no meaning for Slurm, so it stays in the name of the file"
            fix = "type %j for the job's number, %x for its name, %A_%a for an array's task"
            yield line, reason, fix, "type %% for a percent sign"


def log_folder_missing(script: LintedScript) -> Iterator[Found]:
    """Find missing log folders: Slurm creates none, and the job fails before its first line.

    Source: sbatch(1), --output. Tested with 22.05: the job is FAILED with 0:53 at once, and writes
    nothing. Only relative paths are checked, as others may be on another machine.
    """
    for component in script.directives.components:
        for option in (component.get("output"), component.get("error")):
            folder, slash, _ = option.value.rpartition("/") if option else ("", "", "")
            if not option or not slash or option.value[0] in "/~$" or component.get("chdir"):
                continue
            # What Slurm fills in is not known here; the folder above it is.
            known = re.split(r"/?[^/]*[%$\0]", folder)[0]
            fix = ""
            if not (script.folder / known).is_dir():
                fix = f"mkdir -p {shown(known)} before sbatch; in the script it comes too late"
            elif re.search(r"%\d*[jA]", folder):
                fix = f"type --{option.name}={shown(known)}{'/' if known else ''}%x-%j.log"
            if fix:
                reason = f"Slurm makes no folder {shown(folder)}: the job fails without a log"
                yield option.line, reason, fix


def memory_twice(script: LintedScript) -> Iterator[Found]:
    """Find several options for memory (sbatch(1), --mem)."""
    for component in script.directives.components:
        names = ("mem", "mem-per-cpu", "mem-per-gpu")
        given = [option for name in names if (option := component.get(name))]
        if len(given) > 1:
            several = " and ".join(f"--{option.name}" for option in given)
            reason = f"sbatch refuses {several}: --mem is of a node, the others of a CPU or GPU"
            yield max(option.line for option in given), reason, "keep one of them"


def memory_in_megabytes(script: LintedScript) -> Iterator[Found]:
    """Find a --mem without a unit that is too small (sbatch(1), --mem)."""
    for line, name, value in script.all_options:
        number, unit = megabytes(value) or (0, False)
        if name == "mem" and not unit and 0 < number < _LEAST_MEGABYTES:
            reason = f"--mem={value} is {value} megabytes, for all tasks of a node"
            yield line, reason, f"type --mem={value}G"


def export_cut(script: LintedScript) -> Iterator[Found]:
    """Find a value in --export that is cut at a comma (sbatch(1), --export)."""
    for line, name, value in script.all_options:
        items = value.split(",") if name == "export" else []
        wrong = [
            one for one in items if not re.match(r"['\" ]*([A-Za-z_]\w*(=|['\" ]*\Z)|\Z)", one)
        ]
        if wrong:
            reason = f"--export is cut at commas: {shown(wrong[0])} is read as a variable's name"
            yield line, reason, "export the variable in the script: export NAME='a,b'"
