"""Checks for each value of a JobSpec from Python, TOML or a command line. Pure.

Each function takes a given value and returns the value to keep, or raises ValueError with what was
expected; some functions return such a function.
"""

import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "command",
    "environment",
    "extra",
    "flag",
    "integer",
    "line",
    "name",
    "one_of",
    "parts",
    "string",
    "strings",
    "sweep",
    "written",
]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
# Variables of the script and of `hpctrain run`.
SCRIPT_VARIABLES = (
    *("HPCTRAIN_RUN_DIR", "HPCTRAIN_SCRATCH", "HPCTRAIN_SECRET", "HPCTRAIN_STOP_FILE"),
    *("HPCTRAIN_EXIT_STATUS_FILE", "HPCTRAIN_SITE", "file"),
)
_OPTION = re.compile(r"[a-z][a-z0-9-]*\Z", re.ASCII)
_FLAG = re.compile(r"[A-Za-z_][\w.-]*\Z", re.ASCII)
# Slurm takes 1024 bytes; a longer text is a mistake, such as a file in place of a name.
_LONGEST_LINE = 1000
LONGEST_NAME = 200
_MOST_SETTINGS = 10_000
# What the parts of a heterogeneous job may have of their own.
PART_FIELDS = (
    *("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "memory"),
    *("partition", "constraint", "exclude"),
)


def integer(lowest: int, highest: int = 10**6) -> Callable[[Any], int]:
    """Return a check for a whole number, also as text."""

    def check(value: Any) -> int:
        text = str(value).strip()
        is_number = not isinstance(value, bool) and re.fullmatch("[0-9]{1,11}", text)
        if not is_number or not lowest <= int(text) <= highest:
            raise ValueError(f"a whole number from {lowest} to {highest}")
        return int(text)

    return check


def flag(value: Any) -> bool:
    """Check that a value is true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def string(value: Any) -> str:
    """Check a text without NUL; a path is accepted too."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("text without NUL")
    return value


def line(value: Any) -> str:
    """Check a text that fits into a line of #SBATCH."""
    text = string(value)
    if not all(character.isprintable() for character in text):
        raise ValueError("one line of printable characters")
    if len(text.encode()) > _LONGEST_LINE:
        raise ValueError(f"at most {_LONGEST_LINE} bytes")
    return text


def log(value: Any) -> str:
    """Check the name of a log file, in which no shell expands ~ and $."""
    text = line(value)
    if text.startswith("~") or "$" in text:
        raise ValueError("a path as it is, without ~ and $: Slurm is no shell")
    return text


def name(value: Any) -> str:
    """Check a job name, which is also part of file names: Slurm's %x, and the run directory."""
    text = line(value)
    if "/" in text or len(text.encode()) > LONGEST_NAME or text.strip() != text:
        raise ValueError(f"a name without / and of at most {LONGEST_NAME} bytes")
    return text


def one_of(allowed: Sequence[str]) -> Callable[[Any], str]:
    """Return a check for one of the allowed texts."""

    def check(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return check


def written(unit: Callable[[str], Any]) -> Callable[[Any], str]:
    """Return a check by `unit` for a time, a size or a number of GPUs, kept in Slurm's form."""

    def check(value: Any) -> str:
        text = "" if value is None or isinstance(value, bool) else str(value)
        converted = unit(text)
        return converted if isinstance(converted, str) else text

    return check


def strings(value: Any) -> tuple[str, ...]:
    """Check a list of texts, or one text."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list of texts")
    return tuple(map(string, value))


def command(value: Any) -> tuple[str, ...]:
    """Check a list, or a line that is split as in a shell; no shell runs it."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"a list, or a line with its quotes closed ({error})") from None
    arguments = strings(value)
    if arguments and (not arguments[0].strip() or arguments[0].startswith("-")):
        raise ValueError("a program first")
    return arguments


def environment(value: Any) -> dict[str, str]:
    """Check a table of variables that a job may set."""
    if not isinstance(value, Mapping):
        raise ValueError("a table of NAME = value")
    variables = {}
    for name, content in value.items():
        if not isinstance(name, str) or not _may_be_set(name):
            raise ValueError(f"names of variables that a job may set, not {name!r}")
        try:
            variables[name] = _value(content)
        except ValueError as error:
            raise ValueError(f"{error} in {name}") from None
    return variables


def _may_be_set(name: str) -> bool:
    own = name in SCRIPT_VARIABLES or name.startswith("SLURM_")
    return bool(_VARIABLE.match(name)) and not own


def extra(value: Any) -> dict[str, str | bool]:
    """Check long options of sbatch for which JobSpec has no field."""
    if not isinstance(value, Mapping):
        raise ValueError("a table of options of sbatch, without their --")
    options: dict[str, str | bool] = {}
    for name, content in value.items():
        if not isinstance(name, str) or not _OPTION.match(name):
            raise ValueError(f"options of sbatch by their long names, not {name!r}")
        # sbatch accepts the beginning of an option as its name.
        field = next((option for option in sorted(OWN_OPTIONS) if option.startswith(name)), None)
        if field is not None:
            raise ValueError(f"no {name}: that is {OWN_OPTIONS[field]}")
        options[name] = content if isinstance(content, bool) else line(_value(content))
    return options


def parts(value: Any) -> tuple[dict[str, Any], ...]:
    """Check more parts of a job; the values are checked with those of the job."""
    known = ", ".join(PART_FIELDS)
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError(f"a list of tables with {known}")
    found = tuple(canonical(one) for one in value)
    for name in itertools.chain.from_iterable(found):
        if name not in PART_FIELDS:
            raise ValueError(f"parts with {known}, not {name!r}")
    return found


def sweep(value: Any) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Check a grid (a table of lists) or a list of tables; return options and values of each."""
    rows: list[dict[str, Any]] = []
    if isinstance(value, Mapping):
        if not all(isinstance(axis, (list, tuple)) and axis for axis in value.values()):
            raise ValueError("a list of values for each option")
        grid = itertools.product(*value.values()) if value else ()
        for row in itertools.islice(grid, _MOST_SETTINGS + 1):
            rows.append(dict(zip(value, row, strict=True)))
    elif isinstance(value, (list, tuple)) and all(
        isinstance(row, (Mapping, tuple)) for row in value
    ):
        rows = [dict(row) for row in value]
    else:
        raise ValueError("a table of lists, or a list of tables")
    if len(rows) > _MOST_SETTINGS:
        raise ValueError(f"at most {_MOST_SETTINGS} settings")
    for name in itertools.chain.from_iterable(rows):
        if not isinstance(name, str) or not _FLAG.match(name):
            raise ValueError(f"names of options, not {name!r}")
    return tuple(tuple((name, _value(item)) for name, item in row.items()) for row in rows)


def _value(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    return string(value)


# sbatch's names of fields, which a JOB.toml may use.
SLURM_NAMES = {"job_name": "name", "mem": "memory", "ntasks_per_node": "tasks_per_node"}

# Options of sbatch that the command line takes without --extra before them.
EXTRA_OPTIONS = (
    *("begin", "comment", "gres", "licenses", "mail-type", "mail-user", "nodelist", "reservation"),
)


def canonical(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of fields instead of those of sbatch, with dashes or without.

    Raises:
        ValueError: a field is given by both of its names.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        field = SLURM_NAMES.get(name.replace("-", "_"), name)
        if field in found or (field != name and field in given):
            raise ValueError(f"{field}, once: {name} is sbatch's name for it")
        found[field] = value
    return found


# Options with a field of their own, so that no option is given twice.
OWN_OPTIONS = {
    "job-name": "name", "chdir": "the folder in which it is submitted",
    "nodes": "nodes", "ntasks-per-node": "tasks_per_node", "ntasks": "nodes and tasks_per_node",
    "gpus-per-node": "gpus_per_node", "gpus": "gpus_per_node", "mem": "memory",
    "cpus-per-task": "cpus_per_task",
    "time": "time", "partition": "partition", "account": "account", "qos": "qos",
    "constraint": "constraint", "exclude": "exclude", "dependency": "dependency",
    "array": "array", "output": "output",
    "signal": "signal and signal_time", "requeue": "requeue", "no-requeue": "requeue",
    "open-mode": "append, always", "no-kill": "elastic", "export": "environment",
    "wrap": "command", "parsable": "what submit does", "test-only": "submit --dry-run",
    "wait": "submit --wait", "gpus-per-task": "gpus_per_node: all GPUs of a node are for NCCL",
}  # fmt: skip
