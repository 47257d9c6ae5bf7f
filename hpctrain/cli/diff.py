"""`hpctrain diff`: show what has changed in the code since a job was submitted."""

import argparse
import sys

from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.rundir import frozen_code

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Shows, as git does, how the code differs from that which a job runs. Type it in the "
        "folder from which the job was submitted."
    )
    parser.add_argument("job", metavar="JOB", help="number of the job")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    number = arguments.job.partition("_")[0]
    tree = frozen_code.tree_of_job(frozen_code.STORE, number) if number.isdecimal() else None
    if tree is None:
        raise UsageError(
            "HT818",
            f"no frozen code of a job {arguments.job!r} below {frozen_code.STORE}",
            "the number of a job that was submitted from this folder, without --live",
        )
    try:
        sys.stdout.write(frozen_code.difference(frozen_code.STORE, tree))
    except slurm.NoAnswerError as error:
        raise StartError("HT826", f"the code cannot be compared: {error}", "git") from None
    return exit_codes.DONE
