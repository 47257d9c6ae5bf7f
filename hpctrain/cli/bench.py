"""`hpctrain bench`: measure the speed of this cluster, and the overhead of hpctrain on it."""

import argparse
import importlib
from typing import Any

from hpctrain.cli.argument_types import add_start_timeout, count, seconds, typed
from hpctrain.tools.bench.measure import size

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Measures in place of your script, as in srun hpctrain bench allreduce, or "
        "on this machine alone. Each figure has a baseline beside it; the two are measured in turn "
        "in the same processes. Rank 0 shows a table."
    )
    kinds = parser.add_subparsers(required=True, metavar="WHAT", dest="what")
    for add_kind in (_add_step, _add_allreduce):
        add_kind(kinds)


def _add_step(kinds: Any) -> None:
    parser = _kind(kinds, "step", "hpctrain's training loop against a plain torch loop", 40.0)
    _add_backend(parser)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model of torchvision, or small (default: resnet50 on GPUs if torchvision is "
        "installed, else small)",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help="batch size of each rank (default: 128 on GPUs, else 32)",
    )
    parser.add_argument(
        "--precision",
        default="auto",
        choices=("auto", "fp32", "tf32", "bf16", "fp16", "O1", "O2"),
        help="precision of both loops; for O1 and O2 the baseline has fp16 (default: %(default)s)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the models")


def _add_allreduce(kinds: Any) -> None:
    parser = _kind(kinds, "allreduce", "sums over the ranks, by message size", 30.0)
    _add_backend(parser)
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="SIZE[,SIZE…]",
        help="message sizes (default: 4B to 16MB on CPUs, 4B to 256MB on GPUs)",
    )


def _kind(kinds: Any, name: str, text: str, default: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=default,
        metavar="S",
        help="approximate seconds to measure (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="file for the results, as JSON")
    add_start_timeout(parser)
    parser.set_defaults(command=_main)
    return parser


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help="communication backend (default: %(default)s)",
    )


_sizes = typed(
    "list of sizes such as 4B,64kB,1MB",
    lambda text: sorted({size(part) for part in text.split(",")}),
)


def _main(arguments: argparse.Namespace) -> int:
    # Imported by name, and here: it imports torch, which the other commands do not need.
    return int(importlib.import_module("hpctrain.tools.bench.runner").execute(arguments))
