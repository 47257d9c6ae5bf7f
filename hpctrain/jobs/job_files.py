"""JOB.toml: the fields of a JobSpec in a file, and options over them."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs.spec import complaint, unknown
from hpctrain.jobs.values import canonical

__all__ = ["merged", "read"]

# Fields of a row exclude each other: an option replaces those of the file.
_INSTEAD_OF = (("array", "sweep"), ("venv", "conda", "stage_environment"))


def read(path: Path) -> dict[str, Any]:
    """Return the values of a JOB.toml by the names of JobSpec; they are not checked yet.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has names that JobSpec does not have,
            and that are not sbatch's names of its fields.
    """
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("HT802.cannot-read-job", path=path, error=error) from None
    try:
        values = canonical(values)
    except ValueError as error:
        raise complaint([(", ".join(values), str(error))], str(path)) from None
    if problems := unknown(list(values)):
        raise complaint(problems, str(path))
    return values


def merged(file: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file and of options, which replace them; tables are joined."""
    replaced = {
        name for row in _INSTEAD_OF if any(options.get(name) for name in row) for name in row
    }
    values = {name: value for name, value in file.items() if name not in replaced}
    for name, value in options.items():
        below = values.get(name)
        joined = isinstance(value, Mapping) and isinstance(below, Mapping)
        values[name] = {**below, **value} if joined and below else value
    return values
