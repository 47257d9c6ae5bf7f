"""`hpctrain export`: the weights of a checkpoint for other programs."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from hpctrain.rundir import RunDirectory

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "export",
        help="write the weights of a checkpoint as safetensors",
        description="Writes the weights and buffers of the newest whole checkpoint of a run to a "
        "file that other programs read without running code. Several models have model0. and so "
        "on before their names.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("file", metavar="OUT.safetensors", type=Path, help="is replaced")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="of the checkpoint")
    which.add_argument(
        "--best",
        metavar="NAME",
        help="of the kept checkpoints the one with the highest value of this metric, or the lowest "
        "where the name ends in loss",
    )
    parser.add_argument(
        "--ema", action="store_true", help="the averages of --ema in place of the weights"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Imported by name, and here: it imports torch, and the other commands do without.
    checkpoint = importlib.import_module("hpctrain.checkpoint")
    step = checkpoint.export(
        RunDirectory(arguments.run),
        arguments.file,
        step=arguments.step,
        best=arguments.best,
        ema=arguments.ema,
    )
    sys.stdout.write(f"{arguments.file}: the weights of step {step}\n")
    return 0
