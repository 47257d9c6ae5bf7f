"""`hpctrain report`: write an HTML page about one or several runs."""

import argparse
import importlib
import os
import sys

from hpctrain.cli.argument_types import RUN
from hpctrain.errors import exit_codes
from hpctrain.jobs import lookup

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Writes one HTML page with the curves, times, launches and options of a run, or "
        "of several runs side by side. The page needs no other file and no network."
    )
    parser.add_argument("runs", nargs="+", **RUN)
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help="output file; an existing report is replaced (default: RUN_DIR/report.html; for "
        "several runs report.html in this folder)",
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Imported by name, and here: the other commands do not need the plotting modules.
    report = importlib.import_module("hpctrain.monitoring.report")
    runs = [str(lookup.run_directory(name, os.environ)) for name in arguments.runs]
    page = report.write(runs, arguments.output)
    sys.stdout.write(f"{page}: open it in a browser\n")
    return exit_codes.DONE
