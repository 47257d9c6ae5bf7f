"""`hpctrain horovod build`: build a Horovod that fits the installed torch."""

import argparse
import os
import sys

from hpctrain.cli.terminal import note

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = "Commands for Horovod."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "build",
        help="build and install a Horovod that fits the installed torch",
        description="Fetches Horovod's source package and the build tools with this Python's pip, "
        "compiles it for the installed torch (some minutes), keeps the wheel in $HPCTRAIN_CACHE "
        "(default: ~/.cache/hpctrain), installs it, and checks it with a sum over two ranks. An "
        "existing wheel is not built again.",
    )
    device = command.add_mutually_exclusive_group()
    device.add_argument(
        "--cuda",
        action="store_const",
        const=True,
        help="build for GPUs, with NCCL (default if torch is a CUDA build and nvcc is found)",
    )
    device.add_argument(
        "--cpu", dest="cuda", action="store_const", const=False, help="build for CPUs only"
    )
    command.add_argument("--mpi", action="store_true", help="build with MPI as well as gloo")
    command.add_argument(
        "--wheel-only", action="store_true", help="print the wheel's path, without installing it"
    )
    command.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Imported here, because it takes as long as all other commands together.
    from hpctrain.tools.horovod_build import build

    wheel = build(arguments.cuda, arguments.mpi, arguments.wheel_only, os.environ, note)
    if arguments.wheel_only:
        sys.stdout.write(f"{wheel}\n")
    return 0
