"""`hpctrain chaos`: let faults happen in a running job, to see what it survives."""

import argparse
import os
import sys
import time

from hpctrain.cli.argument_types import count, seconds, typed

__all__ = ["add"]

_DEFAULT = "kill,segv,abort"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from hpctrain.tools.chaos import KINDS

    parser.description = (
        "Lets faults happen in one of your running jobs, at random times and to random ranks. The "
        "same seed gives the same faults. Kinds: "
        + "; ".join(f"{kind}: {about}" for kind, about in KINDS.items())
        + "."
    )
    kinds = typed(
        f"list of {', '.join(KINDS)}", lambda text: text.split(","), set(KINDS).issuperset
    )
    parser.add_argument("job", metavar="JOB", help="number of the job, as squeue shows it")
    parser.add_argument(
        "--kinds", type=kinds, default=_DEFAULT, metavar="KIND,…",
        help=f"kinds of faults; one given twice happens twice as often (default: {_DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--count", type=count, default=10, metavar="N", help="number of faults (default: 10)"
    )
    parser.add_argument(
        "--mean", type=seconds, default=60.0, metavar="SECONDS",
        help="mean distance of two faults in seconds (default: 60)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    from hpctrain.tools import chaos

    def report(line: str) -> None:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {line}\n")
        sys.stdout.flush()

    faults = chaos.sequence(arguments.kinds, arguments.count, arguments.mean, arguments.seed)
    happened = chaos.run(arguments.job, faults, os.environ, report)
    if happened < arguments.count:
        sys.stdout.write(f"the job has ended after {happened} of {arguments.count} faults\n")
    return 0
