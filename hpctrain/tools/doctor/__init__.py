"""What is wrong with this machine, or with the ranks of a start? Torch may be missing or broken.

Each rank looks at its own machine, tells the others at the rendezvous what is not well, and sees
whether all of them can compute a sum. Rank 0 speaks for all.
"""

import os
from contextlib import ExitStack

from hpctrain.cluster import launchers
from hpctrain.process import logging
from hpctrain.tools.doctor import cluster_checks, machine, storage
from hpctrain.tools.doctor.findings import worst_last
from hpctrain.tools.doctor.output import Report

__all__ = ["examine"]


def examine(run: str | None, start_timeout: float, as_json: bool) -> int:
    """Look, and say what was found; an exit code: 1 where rank 0 tells of a problem.

    Args:
        run: the run directory, as given.
        start_timeout: seconds to wait for all ranks.
        as_json: one JSON object in place of text.

    Raises:
        UsageError: the environment contradicts itself, or this process is no rank of its own.
        StartError: this is not rank 0, and the ranks did not come together.
    """
    start = launchers.survey()
    logging.setup_logging(start.world.rank)
    if start.stray:
        raise start.stray
    directory = storage.run(run, os.environ)
    with ExitStack() as undo:
        own = machine.examine(start, directory, os.environ, undo)
        report = Report(own, start.world, as_json)
        if start.world.world_size > 1:
            return cluster_checks.examine(report, own, start, directory, start_timeout, os.environ)
        report.tell(worst_last(own.findings))
        return report.end()
