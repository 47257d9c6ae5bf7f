"""`hpctrain completion`: print the script with which a shell completes this command line."""

import argparse
import sys

from hpctrain import cli
from hpctrain.errors import UsageError

__all__ = ["add"]

_PATHS = ("DIR", "FILE", "FILE.html", "IMAGE", "PATH", "RUN", "SCRIPT")  # names in the help


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Prints the script with which a shell completes commands, options and files. shtab writes "
        "it: pip install 'hpctrain[completion]'. Write it again after an update of hpctrain."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that completes")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            "HT651.package-missing", package="shtab", extra="completion", error=error
        ) from None
    parser = cli.parser_of(cli.COMMANDS)
    for action in parser.all_actions():
        if action.nargs == argparse.REMAINDER:
            action.help = "script or command"  # shtab omits what the help hides
        if action.nargs == argparse.REMAINDER or action.metavar in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, arguments.shell) + "\n")
    return 0
