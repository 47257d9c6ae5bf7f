"""Value types of the options, the same for the command line and for keyword arguments."""

import argparse
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hpctrain.cluster.launchers import LONGEST_TIMEOUT
from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError

__all__ = [
    "COUNT",
    "FROM_ZERO",
    "check",
    "fraction",
    "loss_scale",
    "not_negative",
    "option",
    "positive",
    "seconds",
    "workers",
]


def option(
    flag: str,
    default: Any,
    text: str,
    type: Any = str,
    *,
    common: bool = False,
    parsed: Any = None,
    **more: Any,
) -> Any:  # typed as the field's value, as `dataclasses.field` is
    """Return a field of `Options`, with its option on the command line.

    Args:
        flag: option on the command line.
        default: value of the field.
        text: help text.
        type: type of the value, for argparse and for keyword arguments.
        common: whether `hpctrain.options()` has the option; if not, only
            `hpctrain.options(recipe=True)` has it.
        parsed: value that a command line without the option has (default: `default`).
        more: more arguments for argparse.
    """
    parsed = default if parsed is None else parsed
    spec = {"flag": flag, "help": text, "common": common, "default": parsed, **more}
    if "action" not in more:
        spec["type"] = type
    return dataclasses.field(default=default, metadata=spec)


class Number:
    """Number type for argparse, which also checks Python values.

    Args:
        name: name of the type in argparse's messages.
        expected: description of the accepted values, for messages.
        above, below: open interval of the accepted values.
        least: smallest accepted value; given for whole numbers only, in place of the interval.
        literal: a text that is accepted as well.
    """

    def __init__(
        self,
        name: str,
        expected: str,
        above: float = float("-inf"),
        below: float = float("inf"),
        least: int | None = None,
        literal: str | None = None,
    ) -> None:
        self.__name__ = name
        self.expected = expected
        self.above, self.below, self.least, self.literal = above, below, least, literal

    def __call__(self, text: str) -> float | int | str:
        """Convert a text of the command line."""
        if text == self.literal:
            return text
        value = int(text) if self.least is not None else float(text)
        if not self.accepts(value):
            raise argparse.ArgumentTypeError(f"{text} is not {self.expected}")
        return value

    def accepts(self, value: Any) -> bool:
        """Check whether a Python value is accepted."""
        if isinstance(value, str):
            return value == self.literal
        whole = isinstance(value, int) and not isinstance(value, bool)
        if self.least is not None:
            return whole and value >= self.least
        return (whole or isinstance(value, float)) and self.above < value < self.below


COUNT = Number("whole number", "a whole number from 1 on", least=1)
FROM_ZERO = Number("whole number", "a whole number from 0 on", least=0)
positive = Number("number", "a number above 0", above=0.0)
not_negative = Number("number", "a number from 0 on", above=math.nextafter(0.0, -1.0))
fraction = Number("number", "a number above 0 and below 1", above=0.0, below=1.0)
seconds = Number(
    "number of seconds",
    f"a number above 0, and at most {LONGEST_TIMEOUT:.0f} seconds",
    above=0.0,
    below=LONGEST_TIMEOUT + 1.0,
)
workers = Number("number of workers", "a whole number from 0 on, or auto", least=0, literal="auto")
loss_scale = Number("loss scale", "a number above 0, or dynamic", above=0.0, literal="dynamic")


def check(field: Any, value: Any) -> None:
    """Check that the command line would accept the value of a keyword argument.

    Raises:
        UsageError: the command line would refuse it.
    """
    spec = field.metadata
    choices = spec.get("choices")
    if choices and value not in choices:
        near = nearest(str(value), choices) or choices[0]
        raise _refused(spec, value, f"one of {', '.join(choices)}", f"{spec['flag']} {near}")
    if value is None and field.default is None:
        return
    kind = spec.get("type")
    if isinstance(kind, Number) and not kind.accepts(value):
        raise _refused(spec, value, kind.expected)
    if "action" in spec and not isinstance(value, bool):
        raise _refused(spec, value, "True or False")
    if kind is str and not isinstance(value, str):
        raise _refused(spec, value, "text")


def _refused(spec: Mapping[str, Any], value: Any, expected: str, fix: str = "") -> UsageError:
    other = f"another name for an option of the script that is not hpctrain's {spec['flag']}"
    found = f"{spec['flag']} {value if fix else repr(value)}"
    return UsageError("HT501", found, expected, fix, "" if spec["common"] else other)
