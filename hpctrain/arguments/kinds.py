"""Value types of the options, the same for the command line and for keyword arguments."""

import argparse
import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster.texts import nearest
from hpctrain.errors import UsageError

__all__ = ["Number", "check", "expected_instead", "flag", "option", "shown"]


def flag(name: str) -> str:
    """Return the option on the command line of a field of `Options`."""
    return "--" + name.replace("_", "-")


def shown(field: Any) -> str:
    """Return the name of a field of `Options` in messages: its option, else its keyword."""
    return f"{field.name}=" if field.metadata["only_keyword"] else flag(field.name)


def option(
    default: Any,
    text: str,
    type: Any = str,
    *,
    only_keyword: bool = False,
    **more: Any,
) -> Any:  # typed as the field's value, as `dataclasses.field` is
    """Return a field of `Options`, with its option on the command line.

    Args:
        default: value of the field.
        text: help text.
        type: type of the value, for argparse and for keyword arguments; bool for a switch, which
            a default of True or False makes it as well.
        only_keyword: whether the option is a keyword of a Session alone.
        more: more arguments for argparse.
    """
    spec = {"help": text, "only_keyword": only_keyword, "default": default}
    if default is False:
        spec["action"] = "store_true"
    elif default is True or type is bool:
        spec["action"] = argparse.BooleanOptionalAction
    else:
        spec["type"] = type
    if isinstance(type, Number):
        spec["metavar"] = type.metavar
    return dataclasses.field(default=default, metadata={**spec, **more})


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
    expected = expected_instead(field, value)
    if not expected:
        return
    name, choices = shown(field), field.metadata.get("choices")
    if choices:
        near = nearest(str(value), choices) or choices[0]
        raise UsageError(
            "HT501.wrong-choice", option=name, value=value, expected=expected, nearest=near
        )
    assignment = name if name.endswith("=") else f"{name} "
    raise UsageError("HT501.wrong-value", assignment=assignment, value=value, expected=expected)


def expected_instead(field: Any, value: Any) -> str:
    """Return what a field accepts, if it does not accept this value; else nothing."""
    spec = field.metadata
    choices, kind = spec.get("choices"), spec.get("type")
    if choices:
        return "" if value in choices else f"one of {', '.join(choices)}"
    if value is None and field.default is None:
        return ""
    if isinstance(kind, Number) and not kind.accepts(value):
        return kind.expected
    if "action" in spec and not isinstance(value, bool):
        return "True or False"
    return "text" if kind is str and not isinstance(value, str) else ""
