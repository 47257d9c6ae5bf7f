"""JOB.toml: a JobSpec in a file, with the same names."""

import json
import tomllib
from collections.abc import Container
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs.spec import JobSpec, complaint, unknown

__all__ = ["read", "text"]

_MOST_BYTES = 2**20


def read(path: Path) -> dict[str, Any]:
    """Return the values of a JOB.toml by the names of JobSpec; they are not checked yet.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has names that JobSpec does not have.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        values = tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            "HT802",
            f"{path} cannot be read: {error}",
            'a job in TOML, such as\n    command = "python train.py"\n    nodes = 2',
            "hpctrain submit --save JOB.toml --dry-run [options] -- COMMAND … writes one",
        ) from None
    if problems := unknown(list(values)):
        raise complaint(problems, str(path))
    return values


def text(spec: JobSpec, explicit: Container[str] = ()) -> str:
    """Return the TOML text for a JobSpec; defaults are left out.

    Args:
        spec: description of the job.
        explicit: names to write even with default values, as a profile may have other values.
    """
    lines, tables = [], []
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value is None or value in ({}, ()):
            continue
        if value == field.default and field.name not in explicit:
            continue
        if field.name == "sweep":
            tables.append("\n".join(f"[[sweep]]\n{_rows(dict(setting))}" for setting in value))
        elif isinstance(value, dict):
            tables.append(f"[{field.name}]\n{_rows(value)}")
        else:
            lines.append(f"{field.name} = {_value(value)}\n")
    return "\n".join(["".join(lines), *tables])


def _rows(table: dict[str, Any]) -> str:
    return "".join(f"{_text(name)} = {_value(value)}\n" for name, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return _text(str(value))


def _text(value: str) -> str:
    """Return a basic string of TOML.

    Source: https://toml.io/en/v1.0.0#string

    Raises:
        UsageError: the text has bytes that are not UTF-8, which TOML cannot hold.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError("HT801", f"{value!r} is not UTF-8", "text that TOML can hold") from None
    # TOML has the escapes of JSON, except for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
