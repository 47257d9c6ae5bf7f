"""The command line: one file for each command, and the table that names them."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from hpctrain._version import __version__
from hpctrain.errors import HpctrainError

__all__ = ["main"]

# Each is a module here with `add(subparsers)`, which sets the default `command` to a function of
# the parsed arguments that returns an exit code.
COMMANDS = (
    *("run", "submit", "status", "cancel", "requeue", "render", "lint", "site"),
    *("explain", "doctor", "hostlist", "export", "horovod"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an exit code.

    Args:
        arguments: without the program's name (default: those of this process).
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="hpctrain",
        description="One PyTorch training script, unchanged, under every launcher.",
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    # The one that is meant, else all for --help: importing them takes longer than most commands.
    for name in given[:1] if given[:1] and given[0] in COMMANDS else COMMANDS:
        importlib.import_module(f"hpctrain.cli.{name}").add(subparsers)
    parsed = parser.parse_args(given)
    try:
        code = int(parsed.command(parsed))
        sys.stdout.flush()
        return code
    except HpctrainError as error:
        sys.stderr.write(f"hpctrain: error: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        # The reader of a pipe left, as in `hpctrain hostlist … | head -1`.
        from hpctrain.speech import abandon  # which imports logging, as few commands need

        abandon(sys.stdout)
        return 0
