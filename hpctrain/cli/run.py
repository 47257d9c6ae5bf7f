"""`hpctrain run`: start ranks on this machine."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from hpctrain import local
from hpctrain.errors import UsageError

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        allow_abbrev=False,  # what follows SCRIPT is its own
        help="start ranks on this machine",
        description="Start a Python script once for each rank, on this machine. Several nodes are "
        "pretended. The output of each rank comes with its number in front.",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--nproc-per-node",
        "--ntasks-per-node",
        default="auto",
        metavar="M",
        help="ranks of each node: a number, a list such as 2,1, or auto: one for each GPU, or one "
        "(the default)",
    )
    parser.add_argument(
        "--as",
        dest="style",
        choices=local.AS,
        default="hpctrain",
        help="give the ranks the variables that this launcher would give them",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="for SCRIPT")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    if arguments.nodes < 1:
        raise UsageError(f"--nodes {arguments.nodes}", "a number from 1 on", "--nodes 1")
    if not Path(arguments.script).is_file():
        raise UsageError(
            f"{arguments.script} is no file",
            "a Python script",
            "hpctrain run [options] SCRIPT [its arguments]",
        )
    gpus = _gpus()
    counts = local.layout(arguments.nodes, arguments.nproc_per_node, len(gpus))
    command = [sys.executable, arguments.script, *arguments.arguments]
    return local.start(command, counts, os.environ, arguments.style, gpus)


def _gpus() -> list[str]:
    """The GPUs of this machine, without importing torch: what is visible, else the devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
