"""`hpctrain render`: write the batch script of a job, as text."""

import argparse
import os
import sys
from pathlib import Path

from hpctrain.cli.job_options import add_job_options, spec_from
from hpctrain.errors import UsageError
from hpctrain.jobs import site
from hpctrain.jobs.schedulers import SCHEDULERS
from hpctrain.jobs.script import render

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.allow_abbrev = False  # options after the command belong to it
    parser.description = (
        "Writes a script for sbatch to standard output, as `hpctrain submit` would, without asking "
        "Slurm or starting a process. Its log is in the folder of the submission, as Slurm makes "
        "no folder, and it runs the code as it is. With --scheduler, the script is for qsub of "
        "PBS or for flux batch."
    )
    parser.add_argument("-o", "--to", metavar="FILE", help="new file for the script")
    parser.add_argument(
        "--scheduler",
        choices=SCHEDULERS,
        default="slurm",
        help="scheduler that the script is for (default: %(default)s)",
    )
    add_job_options(parser)
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # As bytes, because the terminal may have another encoding than the file.
    spec = site.completed(spec_from(arguments), os.environ)
    text = render(spec, scheduler=arguments.scheduler)
    script = text.encode(errors="surrogateescape")
    if arguments.to is None:
        sys.stdout.buffer.write(script)
        sys.stdout.buffer.flush()
        return 0
    try:
        # "x" keeps a script that the user has edited.
        with Path(arguments.to).open("xb") as file:
            file.write(script)
    except FileExistsError:
        raise UsageError("HT808.output-exists", arguments=arguments) from None
    except OSError as error:
        raise UsageError("HT809.cannot-write-output", arguments=arguments, error=error) from None
    return 0
