"""Codes and messages of errors: `hpctrain explain CODE` and docs/errors.md show them.

`codes.toml` is read at the first error.
"""

import functools
import re
import shlex
import string
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Code", "Message", "codes", "filled", "is_key", "message"]

_KEY = re.compile(r"(HT\d{3})\.([a-z0-9-]+)")
_PLACEHOLDER = re.compile(r"\{\w+\}")
_LAST = re.compile(r"^$|\w+")


@dataclass(frozen=True, slots=True)
class Message:
    """Text of an error, or its template, with placeholders such as `{host}`.

    Attributes:
        code: code of the error, such as `HT614`.
        found: what was found.
        expected: what was expected; may be empty.
        fixes: what to type; any one of them is enough.
    """

    code: str
    found: str
    expected: str = ""
    fixes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Code:
    """Entry of an error's code.

    Attributes:
        meaning: what went wrong, in one sentence.
        causes: usual causes, the most frequent first.
        messages: templates by key.
    """

    meaning: str
    causes: Sequence[str]
    messages: Mapping[str, Message]

    @property
    def fixes(self) -> list[str]:
        """The fixes of all messages, each once, with placeholders in capitals."""
        fixes = [fix for message in self.messages.values() for fix in message.fixes]
        texts = [_capitals(fix) for fix in fixes if not _PLACEHOLDER.fullmatch(fix)]
        return list(dict.fromkeys(texts))


@functools.cache
def codes() -> dict[str, Code]:
    """Return the entries of `codes.toml`."""
    text = Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")
    entries = {}
    for code, entry in tomllib.loads(text).items():
        meaning, causes = entry.pop("meaning"), entry.pop("causes")
        entries[code] = Code(meaning, causes, {k: Message(code, **m) for k, m in entry.items()})
    return entries


def is_key(text: str) -> bool:
    """Return whether a text is the key of a message, such as `HT614.no-end`."""
    match = _KEY.fullmatch(text)
    return match is not None and match[1] in codes() and match[2] in codes()[match[1]].messages


def message(key: str, **values: object) -> Message:
    """Return a message with its placeholders filled in.

    A fix that is one placeholder becomes one fix for each item of a list or another iterable. Empty
    fixes are omitted, and paths in them are quoted for a shell where that is needed.

    Args:
        key: key of the message.
        values: values of the placeholders.

    Raises:
        KeyError: there is no such message, or a value is missing.
    """
    code, _, name = key.partition(".")
    return filled(codes()[code].messages[name], values)


def filled(template: Message, values: Mapping[str, object]) -> Message:
    """Return a template with its placeholders filled in, as `message` does."""
    fixes: list[str] = []
    for fix in template.fixes:
        several = values.get(fix[1:-1]) if fix.startswith("{") else None
        if isinstance(several, Iterable) and not isinstance(several, str):
            fixes += several
        else:
            fixes.append(_Typed().vformat(fix, (), values))
    return Message(
        template.code,
        _fill(template.found, values),
        _fill(template.expected, values),
        tuple(filter(None, fixes)),
    )


def _capitals(template: str) -> str:
    """Return a template with the names of its placeholders in capitals: `--seed {seed}`, `SEED`."""
    parts = string.Formatter().parse(template)
    return "".join(text + _LAST.findall(name or "")[-1].upper() for text, name, _, _ in parts)


class _Typed(string.Formatter):
    """Formatter of a text to type."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if isinstance(value, Path):
            return shlex.quote(str(value))
        return super().format_field(value, format_spec)


def _fill(template: str, values: Mapping[str, Any]) -> str:
    return string.Formatter().vformat(template, (), values)
