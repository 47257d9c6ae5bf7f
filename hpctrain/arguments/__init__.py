"""Training options: one table defines both the command line and the keyword arguments.

parser = hpctrain.options()
parser.add_argument("--width", type=int, default=64)
session = hpctrain.Session(parser.parse_args())
session = hpctrain.Session(backend="ddp", precision="bf16")
"""

import argparse
import dataclasses
from typing import Any

from hpctrain.arguments.batches import Batches, plan_batches
from hpctrain.arguments.recipe import Parser
from hpctrain.arguments.table import Options
from hpctrain.rendezvous import shared_errors

__all__ = ["Batches", "Options", "add_options", "options", "plan_batches"]


def options(**parser_arguments: Any) -> Parser:
    """Return a parser with the training options and `--recipe`; add your own options to it.

    An uncaught `HpctrainError` then ends the process with one message and its exit code.

    Args:
        parser_arguments: keyword arguments for `argparse.ArgumentParser`, such as `description`.
    """
    shared_errors.report_uncaught()
    parser = Parser(allow_abbrev=False, **parser_arguments)
    add_options(parser)
    return parser


def add_options(parser: Parser) -> None:
    """Add the training options and `--recipe` to a parser."""
    group = parser.add_argument_group("training options")
    group.add_argument(
        "--recipe",
        metavar="FILE.toml",
        default=argparse.SUPPRESS,
        help="file with defaults for this command line: option names, with _ for -, and values",
    )
    for field in dataclasses.fields(Options):
        spec = dict(field.metadata)
        flag = spec.pop("flag")
        if field.default not in (None, False):
            spec["help"] += " (default: %(default)s)"
        group.add_argument(flag, dest=field.name, default=field.default, **spec)
    # torch.distributed.launch passes it to every script; `launchers` reads it.
    parser.add_argument(
        *("--local_rank", "--local-rank"),
        type=int,
        help=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
    )
