"""Option types that several commands share."""

import argparse

from hpctrain.cluster.launchers import LONGEST_TIMEOUT

__all__ = ["seconds"]


def seconds(text: str) -> float:
    """Convert a text to a number of seconds above 0 that sockets can wait for."""
    value = float(text)
    if not 0 < value <= LONGEST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {LONGEST_TIMEOUT:.0f}")
    return value


seconds.__name__ = "number of seconds"  # for argparse's messages
