"""Arguments, and types of arguments, that several commands share."""

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["RUN", "add_start_timeout", "count", "port", "seconds", "typed"]

# The name of a job or run: keywords of `add_argument`.
RUN: Any = {"metavar": "RUN", "help": "job number, run directory, or job name"}


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


def add_start_timeout(parser: argparse.ArgumentParser) -> None:
    """Add the option for the time that the ranks have to connect."""
    parser.add_argument(
        "--start-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds to wait for all ranks (default: %(default)s)",
    )
