"""`hpctrain horovod build`: a Horovod that fits the installed torch."""

import argparse
import os
import sys
from typing import Any

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "horovod",
        help="build and install a Horovod that fits the installed torch",
        description="What has to do with Horovod.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "build",
        help="build and install a Horovod that fits the installed torch",
        description="Fetches Horovod's source package and the build tools with this Python's pip, "
        "compiles it for the installed torch (some minutes), keeps the wheel in $HPCTRAIN_CACHE "
        "(default: ~/.cache/hpctrain), installs it, and lets two ranks compute a sum. What is "
        "there already is not built again.",
    )
    device = command.add_mutually_exclusive_group()
    device.add_argument(
        "--cuda",
        action="store_const",
        const=True,
        help="for GPUs, over NCCL (default: where torch is a CUDA build and nvcc is there)",
    )
    device.add_argument(
        "--cpu", dest="cuda", action="store_const", const=False, help="for CPUs alone"
    )
    command.add_argument("--mpi", action="store_true", help="also over MPI, besides gloo")
    command.add_argument(
        "--wheel-only", action="store_true", help="print the wheel's path; install nothing"
    )
    command.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Here: it takes as long to import as all other commands together.
    from hpctrain.tools.horovod_build import build

    wheel = build(arguments.cuda, arguments.mpi, arguments.wheel_only, os.environ, _say)
    if arguments.wheel_only:
        sys.stdout.write(f"{wheel}\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"hpctrain: {line}\n")
    sys.stderr.flush()
