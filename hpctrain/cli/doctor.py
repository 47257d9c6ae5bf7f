"""`hpctrain doctor`: what is wrong with this machine, or with all ranks of a start."""

import argparse
import importlib
from typing import Any

from hpctrain.cli.argument_types import seconds

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at this machine; under a launcher at all ranks, and let them compute a sum",
        description="Looks at what a training needs of this machine, and says what to type where "
        "something is missing. In place of your script, as in srun hpctrain doctor, it looks at "
        "all ranks, compares them, and checks and times a sum over them. Exit code 1 where there "
        "is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--run",
        metavar="DIR",
        help="run directory to look at (default: $HPCTRAIN_RUN, else runs)",
    )
    parser.add_argument(
        "--start-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds to wait for all ranks (default: %(default)s)",
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Imported by name, and here: the doctor imports torch, and the other commands do without.
    doctor = importlib.import_module("hpctrain.tools.doctor")
    return int(doctor.examine(arguments.run, arguments.start_timeout, arguments.json))
