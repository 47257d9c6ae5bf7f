"""Training options: one table defines both the command line and the keyword arguments.

parser = hpctrain.options()
parser.add_argument("--width", type=int, default=64)
session = hpctrain.Session(parser.parse_args())
session = hpctrain.Session(backend="ddp", precision="bf16")
session = hpctrain.Session({"backend": "ddp", "ddp": {"static_graph": True}})
"""

import argparse
import dataclasses
from typing import Any

from hpctrain.arguments.batches import Batches, plan_batches
from hpctrain.arguments.kinds import flag
from hpctrain.arguments.parser import Parser
from hpctrain.arguments.table import Given, Options, foreign_names, named, names_of
from hpctrain.rendezvous import shared_errors

__all__ = [
    "Batches",
    "Given",
    "Options",
    "add_options",
    "foreign_names",
    "named",
    "names_of",
    "options",
    "plan_batches",
]


def options(**parser_arguments: Any) -> Parser:
    """Return a parser with the training options; add the arguments of your script to it.

    An argument of your own stays yours: a Session reads only the options that are added here. With
    `conflict_handler="resolve"`, your argument may replace one of them. An uncaught `HpctrainError`
    then ends the process with one message and its exit code.

    Args:
        parser_arguments: keyword arguments for `argparse.ArgumentParser`, such as `description`.
    """
    shared_errors.report_uncaught()
    parser = Parser(allow_abbrev=False, **parser_arguments)
    add_options(parser)
    return parser


def add_options(parser: Parser) -> None:
    """Add the training options to a parser, except those that are keywords alone."""
    group = parser.add_argument_group("training options")
    for field in dataclasses.fields(Options):
        spec = dict(field.metadata)
        if spec.pop("only_keyword"):
            parser.only_keywords.append(field.name)
            continue
        if spec["default"] not in (None, False):
            spec["help"] += " (default: %(default)s)"
        parser.add_training_option(group.add_argument, flag(field.name), **spec)
    # torch.distributed.launch passes it to every script; `launchers` reads it.
    hidden = argparse.SUPPRESS
    parser.add_argument("--local_rank", "--local-rank", type=int, help=hidden, default=hidden)
