"""`hpctrain hostlist`: the hosts of a Slurm host list, and the way back."""

import argparse
import sys
from typing import Any

from hpctrain.cluster.hostlist import compress, expand
from hpctrain.errors import UsageError

__all__ = ["add"]

# Of standard input: room for a million names, and none for an endless stream.
_MOST_BYTES = 2**24


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "hostlist",
        help="expand a Slurm host list, or write one",
        description="One host a line, or with --compress one expression for all names.",
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="EXPR",
        help="such as node[01-03,7],login, or names with --compress; - reads standard input",
    )
    parser.add_argument(
        "--compress", action="store_true", help="the expression that keeps their order and number"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    words = [word for given in arguments.words for word in _words(given)]
    lines = [compress(words)] if arguments.compress else expand(",".join(words))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _words(given: str) -> list[str]:
    """What was given, or for - what stands in standard input, between white space."""
    if given != "-":
        return [given]
    # As bytes: what is no text is refused as a part of a name.
    read = sys.stdin.buffer.read(_MOST_BYTES + 1)
    if len(read) > _MOST_BYTES:
        raise UsageError(f"more than {_MOST_BYTES} bytes on standard input", "host names")
    return read.decode(errors="surrogateescape").split()
