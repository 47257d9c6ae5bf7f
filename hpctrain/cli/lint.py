"""`hpctrain lint`: find errors in a batch script before it is submitted to Slurm."""

import argparse
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.jobs.lint import LintFinding, lint

__all__ = ["add"]

# A batch script of more carries data, which takes long to read.
_MOST_BYTES = 2**17


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Reads batch scripts for sbatch, also those not made by hpctrain, and prints "
        "their errors: file, line, rule, reason, and what to type. Exit code 1 if there is an "
        "error. Log folders and Python scripts are searched for in the current folder, as sbatch "
        "does; no script is executed. ShellCheck (shellcheck.net) finds what is wrong with the "
        "shell code itself."
    )
    parser.add_argument(
        "scripts", nargs="+", metavar="SCRIPT", help="batch script; - reads standard input"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    findings: list[tuple[str, LintFinding]] = []
    errors = []
    for name in arguments.scripts:
        try:
            findings += [(name, finding) for finding in lint(_text(name), Path.cwd())]
        except UsageError as error:
            errors.append(error)
    if arguments.json:
        entries = [{"file": name, **dataclasses.asdict(finding)} for name, finding in findings]
        sys.stdout.write(json.dumps(entries) + "\n")
    else:
        sys.stdout.writelines(_report(name, finding) for name, finding in findings)
    if errors:
        sys.stdout.flush()
        *others, last = errors
        found = "\n".join([*map(str, others), last.found])
        raise UsageError.of_text(last.code, found, last.expected, *last.fixes)
    return 1 if findings else 0


def _report(name: str, finding: LintFinding) -> str:
    place = f"{'standard input' if name == '-' else name}:{finding.line}"
    fixes = "\n  or:       ".join(finding.fixes)
    return f"{place}: {finding.rule}: {finding.reason}\n  fix:      {fixes}\n"


def _text(name: str) -> str:
    """Return the text of a script.

    Raises:
        UsageError: the script cannot be read, is not text, or is not a batch script.
    """
    try:
        if name == "-":
            read = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                read = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError("HT824.cannot-read-script", name=name, reason=reason) from error
    text = read.decode(errors="backslashreplace")
    in_python = name.endswith(".py") and not re.search(r"^#SBATCH", text, re.MULTILINE)
    no_shebang = not text.startswith("#!") and "#SBATCH" not in text
    for wrong, key in (
        (len(read) > _MOST_BYTES, "HT824.too-large"),
        (not read.strip(), "HT824.empty"),
        (b"\0" in read, "HT824.not-text"),
        (name.endswith(".toml"), "HT824.job-toml"),
        (in_python, "HT824.python-script"),
        (no_shebang, "HT824.no-shebang"),
    ):
        if wrong:
            raise UsageError(key, name=name, quoted=shlex.quote(name))
    return text
