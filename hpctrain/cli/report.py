"""`hpctrain report`: how runs went, on one page."""

import argparse
import importlib
import sys
from typing import Any

from hpctrain import rundir

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="show how runs went, on one HTML page",
        description="Writes one HTML page with the curves, times, starts and options of a run, or "
        "of several side by side, and the figures as PNGs into a folder beside it. The page needs "
        "no other file and no network.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help="is replaced where it is a report (default: RUN_DIR/report.html; of several runs "
        "report.html in this folder)",
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # By name, and here: the other commands do without what draws.
    report = importlib.import_module("hpctrain.monitoring.report")
    page, figures = report.write(arguments.runs, arguments.output)
    beside = f", and {len(figures)} figures in {figures[0].parent}" if figures else ""
    sys.stdout.write(f"{page}: open it in a browser{beside}\n")
    return rundir.DONE
