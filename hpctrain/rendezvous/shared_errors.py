"""Errors that several ranks raise with the same text: only the first of these ranks prints it.

Under `hpctrain run` the ranks find out by a file in a folder of the start. Under other launchers,
ranks with an error of wrong use meet for a few seconds. Rank 0 prints its own error before, and
each other rank prints its own unless a lower rank has told it the same text. So no error is lost.
All leave the meeting together. A launcher that ends the others after the first exit code, such as
`srun --kill-on-bad-exit`, then finds the same code on all ranks.
"""

import contextlib
import dataclasses
import hashlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from hpctrain import errors
from hpctrain.cluster import env_vars, launchers
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.process import failure_record
from hpctrain.rendezvous import Answer, Roster, meet
from hpctrain.rendezvous.messages import GRACE_SECONDS

__all__ = ["report", "report_uncaught"]

# More than the ranks differ in the time of their imports on most file systems.
_SECONDS = 5.0


def report_uncaught() -> None:
    """Let an uncaught error end this rank with one message: see `errors.report_uncaught`."""
    errors.report_uncaught(report, lambda text: failure_record.shows(os.environ, text))


def report(error: HpctrainError, stream: TextIO | None = None) -> None:
    """Write an error with which this process is about to end, unless another rank writes it.

    Args:
        error, stream: as for `errors.write_error`.
    """
    if os.environ.get(env_vars.EVIDENCE):
        if failure_record.shows(os.environ, str(error)):
            error.reported_by_rank_0 = False
            errors.write_error(error, stream)
        return
    start = _start(error)
    if start is None:
        errors.write_error(error, stream)
    else:
        _meet(error, start, partial(errors.write_error, error, stream))


def _start(error: HpctrainError) -> launchers.Start | None:
    """Return the start of this process if other ranks may have the same error; else None."""
    if not isinstance(error, UsageError) or threading.current_thread() != threading.main_thread():
        return None
    try:
        start = launchers.survey()
    except HpctrainError:
        return None
    return None if start.world.world_size == 1 or start.stray else start


def _meet(error: HpctrainError, start: launchers.Start, write: Callable[[], None]) -> None:
    rank, point = start.world.rank, start.rendezvous_point
    # A launcher ends the other ranks by SIGTERM. This one ends by itself, with its own exit code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        write()

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank:
            write()
        os._exit(error.exit_code)

    signal.signal(signal.SIGTERM, end)
    first = rank
    text = hashlib.sha256(str(error).encode(errors="surrogateescape")).hexdigest()
    point = dataclasses.replace(point, key=f"{point.key}/error", store=None)
    with contextlib.suppress(HpctrainError, OSError):
        seconds = _SECONDS - (GRACE_SECONDS if rank else 0)
        met = meet(start.world, point, {"text": text}, seconds, check=_first_ranks)
        if met.listener is not None:
            met.listener.close()
        first = met.own
        error.reported_by_rank_0 = False
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank and first == rank:
        write()


def _first_ranks(roster: Roster) -> Answer:
    """Return for each rank the lowest one with the same text."""
    first: dict[str, int] = {}
    texts = [entry["text"] for entry in roster.entries]
    return Answer(own=[first.setdefault(text, rank) for rank, text in enumerate(texts)])
