"""Value types of the options, the same for the command line and for keyword arguments."""

import argparse
import contextlib
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError

__all__ = ["Number", "check", "common", "flag", "option"]


def flag(name: str) -> str:
    """Return the option on the command line of a field of `Options`."""
    return "--" + name.replace("_", "-")


def option(
    default: Any,
    text: str,
    type: Any = str,
    *,
    common: bool = False,
    **more: Any,
) -> Any:  # typed as the field's value, as `dataclasses.field` is
    """Return a field of `Options`, with its option on the command line.

    Args:
        default: value of the field.
        text: help text.
        type: type of the value, for argparse and for keyword arguments; bool for a switch, which
            a default of True or False makes it as well.
        common: whether `hpctrain.options()` has the option; if not, only
            `hpctrain.options(recipe=True)` has it.
        more: more arguments for argparse.
    """
    spec = {"help": text, "common": common, "default": default}
    if default is False:
        spec["action"] = "store_true"
    elif default is True or type is bool:
        spec["action"] = argparse.BooleanOptionalAction
    else:
        spec["type"] = type
    if isinstance(type, Number):
        spec["metavar"] = type.metavar
    return dataclasses.field(default=default, metadata={**spec, **more})


common = functools.partial(option, common=True)


@dataclass(frozen=True)
class Number:
    """Number type for argparse, which also checks Python values.

    Attributes:
        expected: description of the accepted values, for messages.
        metavar: name of a value in the help.
        above, below: open interval of the accepted values.
        least: smallest accepted value; given for whole numbers only, in place of the interval.
        literal: a text that is accepted as well.
    """

    expected: str
    metavar: str = "X"
    above: float = -math.inf
    below: float = math.inf
    least: int | None = None
    literal: str | None = None

    def __call__(self, text: str) -> float | int | str:
        """Convert a text of the command line."""
        value: float | int | str = text
        with contextlib.suppress(ValueError):
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


def check(field: Any, value: Any) -> None:
    """Check that the command line would accept the value of a keyword argument.

    Raises:
        UsageError: the command line would refuse it.
    """
    spec = field.metadata
    choices = spec.get("choices")
    if choices and value not in choices:
        near = nearest(str(value), choices) or choices[0]
        raise _refused(field, value, f"one of {', '.join(choices)}", f"{flag(field.name)} {near}")
    if value is None and field.default is None:
        return
    kind = spec.get("type")
    if isinstance(kind, Number) and not kind.accepts(value):
        raise _refused(field, value, kind.expected)
    if "action" in spec and not isinstance(value, bool):
        raise _refused(field, value, "True or False")
    if kind is str and not isinstance(value, str):
        raise _refused(field, value, "text")


def _refused(field: Any, value: Any, expected: str, fix: str = "") -> UsageError:
    name = flag(field.name)
    other = f"another name for an option of the script that is not hpctrain's {name}"
    found = f"{name} {value if fix else repr(value)}"
    return UsageError("HT501", found, expected, fix, "" if field.metadata["common"] else other)
