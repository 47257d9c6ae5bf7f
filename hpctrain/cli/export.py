"""`hpctrain export`: write the weights of a checkpoint for other programs."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from hpctrain.cli.argument_types import RUN
from hpctrain.jobs import job_status

__all__ = ["add"]

_MOST_NAMED = 5


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Writes the weights and buffers of the newest complete checkpoint of a run to "
        "files that other programs read without running code. With several models, the names "
        "begin with model0. and so on."
    )
    parser.add_argument("run", **RUN)
    parser.add_argument(
        "target",
        metavar="OUT",
        type=Path,
        help="OUT.safetensors: a file, replaced if it exists; else a new folder with several files "
        "and Hugging Face's index, of which one at a time is in memory",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="step of the checkpoint")
    which.add_argument(
        "--best",
        metavar="NAME",
        help="metric that selects the checkpoint: highest value, or lowest if the name ends in "
        "loss",
    )
    parser.add_argument(
        "--file-gb", type=float, metavar="GB", default=5.0, help="size of a file in a folder (5)"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Imported by name, and here: it imports torch, which the other commands do not need.
    checkpoint = importlib.import_module("hpctrain.checkpoint")
    directory = job_status.only_run(arguments.run, os.environ)
    step = checkpoint.export(
        directory,
        arguments.target,
        step=arguments.step,
        best=arguments.best,
        file_bytes=max(1, int(arguments.file_gb * 1e9)),
    )
    sys.stdout.write(f"{arguments.target}: the weights of step {step}\n")
    if frozen := checkpoint.frozen(directory, step, most=_MOST_NAMED):
        sys.stdout.write(f"frozen: {frozen}\n")
    return 0
