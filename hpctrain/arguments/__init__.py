"""Training options: one table defines both the command line and the keyword arguments.

parser = hpctrain.options()  # or options(recipe=True), with data and the like
parser.add_argument("--width", type=int, default=64)
session = hpctrain.Session(parser.parse_args())
session = hpctrain.Session(backend="ddp", precision="bf16")
session = hpctrain.Session({"backend": "ddp", "width": 64})
"""

import argparse
import dataclasses
from typing import Any

from hpctrain.arguments.batches import Batches, plan_batches
from hpctrain.arguments.kinds import flag
from hpctrain.arguments.recipe import Parser
from hpctrain.arguments.table import Given, Options, named
from hpctrain.rendezvous import shared_errors

__all__ = ["Batches", "Given", "Options", "add_options", "named", "options", "plan_batches"]


def options(*, recipe: bool = False, **parser_arguments: Any) -> Parser:
    """Return a parser with the training options and `--recipe`; add your own options to it.

    An uncaught `HpctrainError` then ends the process with one message and its exit code.

    Args:
        recipe: whether the parser has all training options. By default it has those that concern
            the start and the run, and a script may use the other names for options of its own; a
            Session then reads these values in the same way.
        parser_arguments: keyword arguments for `argparse.ArgumentParser`, such as `description`.
    """
    shared_errors.report_uncaught()
    parser = Parser(allow_abbrev=False, **parser_arguments)
    add_options(parser, recipe)
    return parser


def add_options(parser: Parser, recipe: bool) -> None:
    """Add the training options and `--recipe` to a parser.

    Args:
        parser: parser to change.
        recipe: whether to add all training options, or the common ones alone.
    """
    group = parser.add_argument_group("training options")
    group.add_argument(
        "--recipe",
        metavar="FILE.toml",
        default=argparse.SUPPRESS,
        help="file with defaults for this command line: option names, with _ for -, and values",
    )
    for field in dataclasses.fields(Options):
        spec = dict(field.metadata)
        if not (spec.pop("common") or recipe):
            parser.only_with_recipe[flag(field.name)] = field.name
            continue
        if spec["default"] not in (None, False):
            spec["help"] += " (default: %(default)s)"
        group.add_argument(flag(field.name), **spec)
    # torch.distributed.launch passes it to every script; `launchers` reads it.
    hidden = argparse.SUPPRESS
    parser.add_argument("--local_rank", "--local-rank", type=int, help=hidden, default=hidden)
