"""`hpctrain hostlist`: the hosts of a Slurm host list."""

import argparse
import sys
from typing import Any

from hpctrain.hostlist import expand

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "hostlist", help="expand a Slurm host list", description="One host a line."
    )
    parser.add_argument("expression", metavar="EXPR", help="such as node[01-03,7],login")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    sys.stdout.write("".join(f"{host}\n" for host in expand(arguments.expression)))
    return 0
