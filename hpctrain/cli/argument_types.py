"""Option types that several commands share."""

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["count", "port", "seconds", "typed"]


def typed(
    name: str, convert: Callable[[str], Any], accepts: Callable[[Any], bool] = bool
) -> Callable[[str], Any]:
    """Return a type for argparse.

    Args:
        name: description of the accepted values, for argparse's message.
        convert: function from the text to the value; it raises a ValueError for other texts.
        accepts: function that returns whether a value is accepted.
    """

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is no {name}")
        return value

    return parse


def _can_wait(value: float) -> bool:
    from hpctrain.cluster.launchers import LONGEST_TIMEOUT  # imports much that few options need

    return 0 < value <= LONGEST_TIMEOUT


count = typed("whole number from 1 on", int, lambda value: value >= 1)
port = typed("port from 1 to 65535", int, lambda value: 0 < value < 1 << 16)
seconds = typed("number of seconds above 0 that sockets can wait for", float, _can_wait)
