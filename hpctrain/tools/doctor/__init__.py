"""`hpctrain doctor`: checks of this machine and of the ranks of a launch.

The checks also work where torch is missing or broken. Each rank checks its own machine, sends its
warnings and problems to the others at the rendezvous, and computes test sums with them. Rank 0
prints the report.
"""

import os
from contextlib import ExitStack

from hpctrain.cluster import launchers
from hpctrain.process import logging
from hpctrain.tools.doctor import machine, ranks, storage
from hpctrain.tools.doctor.report import Report

__all__ = ["examine"]


def examine(run: str | None, start_timeout: float, as_json: bool) -> int:
    """Run all checks, print the report at rank 0, and return an exit code.

    Args:
        run: run directory from the command line; None for the default.
        start_timeout: seconds to wait for all ranks.
        as_json: whether to print one JSON object instead of text.

    Returns:
        1 where rank 0 reports a problem; the error's code where the rendezvous fails; else 0.

    Raises:
        UsageError: the environment contradicts itself, or this process is not a separate rank.
        StartError: the rendezvous failed, and this is not rank 0.
    """
    start = launchers.survey()
    logging.setup_logging(start.world.rank)
    if start.stray:
        raise start.stray
    directory = storage.run_directory(run, os.environ)
    with ExitStack() as undo:
        own = machine.examine(start, directory, os.environ, undo)
        report = Report(own.facts, start.world, as_json)
        if start.world.world_size > 1:
            return ranks.examine(report, own, start, directory, start_timeout)
        report.machines(own.findings)
        return report.end()
