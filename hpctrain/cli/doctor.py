"""`hpctrain doctor`: find problems of this machine, or of all ranks of a launch."""

import argparse
import importlib

from hpctrain.cli.argument_types import add_start_timeout

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Checks what training needs on this machine, and shows what to type if "
        "something is missing. Instead of your script, as in srun hpctrain doctor, it checks "
        "all ranks, compares them, and checks a sum over them. Exit code 1 if there is a problem."
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="run directory to check (default: $HPCTRAIN_RUN_DIR, else runs)",
    )
    add_start_timeout(parser)
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Imported by name, and here: the doctor imports torch, which the other commands do not need.
    doctor = importlib.import_module("hpctrain.tools.doctor")
    return int(doctor.examine(arguments.run_dir, arguments.start_timeout, arguments.json))
