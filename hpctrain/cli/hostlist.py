"""`hpctrain hostlist`: expand a Slurm host list, or compress host names to one."""

import argparse
import sys

from hpctrain.cluster.hostlist import compress, expand
from hpctrain.errors import UsageError

__all__ = ["add"]

# Limit for standard input: enough for a million names, and a stop for an endless stream.
_MOST_BYTES = 2**24


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Prints one host per line, or with --compress one expression for all names."
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="EXPR",
        help="host list such as node[01-03,7],login, or names with --compress; - reads standard "
        "input",
    )
    parser.add_argument(
        "--compress",
        action="store_true",
        help="print one expression that keeps the order and number of the names",
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    names = [name for argument in arguments.names for name in _names(argument)]
    lines = [compress(names)] if arguments.compress else expand(",".join(names))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _names(argument: str) -> list[str]:
    """Return the given name, or for - the names in standard input."""
    if argument != "-":
        return [argument]
    # As bytes: bytes that are not text are refused later, as part of a name.
    content = sys.stdin.buffer.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise UsageError("HT824", f"more than {_MOST_BYTES} bytes on standard input", "host names")
    return content.decode(errors="surrogateescape").split()
