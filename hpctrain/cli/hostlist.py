"""`hpctrain hostlist`: expand a Slurm host list."""

import argparse
import sys

from hpctrain.cluster.hostlist import expand

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = "Prints one host per line, as `scontrol show hostnames` does."
    parser.add_argument(
        "lists", nargs="+", metavar="LIST", help="host list such as node[01-03,7],login"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    hosts = expand(",".join(arguments.lists))
    sys.stdout.write("".join(f"{host}\n" for host in hosts))
    return 0
