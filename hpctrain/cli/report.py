"""`hpctrain report`: write an HTML page about one or several runs."""

import argparse
import importlib
import os
import sys

from hpctrain.cli.argument_types import RUN
from hpctrain.cli.terminal import note
from hpctrain.cluster.texts import printable
from hpctrain.errors import exit_codes
from hpctrain.jobs import job_status
from hpctrain.rundir import RunDirectory

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Writes one HTML page with the curves, times, launches and options of a run, or "
        "of several runs side by side. Other files and folders among the names are skipped. The "
        "page needs no other file and no network."
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
    paths = [
        path for name in arguments.runs for path in job_status.run_directories(name, os.environ)
    ]
    # Of runs/NAME-*, the shell also gives the logs, and folders of jobs that have not started.
    others = [path for path in paths if path.exists() and not RunDirectory(path).runs()]
    if len(others) < len(paths):
        for path in others:
            note(f"{printable(path)} is skipped: it has no run")
        paths = [path for path in paths if path not in others]
    page = report.write(list(map(str, paths)), arguments.output)
    sys.stdout.write(f"{page}: open it in a browser\n")
    return exit_codes.DONE
