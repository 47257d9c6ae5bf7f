"""The thread of a tracker: rows go in at once, and out as fast as the tracker takes them."""

import queue
import threading
from collections.abc import Mapping
from typing import Any

from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.process.logging import logger

__all__ = ["Outlet"]

# What waits for a tracker that hangs; some hundred bytes each.
_MOST_ROWS = 100_000


class Outlet:
    """A tracker at work.

    Args:
        name: in `--track`.
        kind: of the tracker.
        about: the run.

    Attributes:
        name: as given.
    """

    def __init__(self, name: str, kind: type[Tracker], about: About) -> None:
        self.name = name
        self._rows: queue.SimpleQueue[Mapping[str, Any] | str] = queue.SimpleQueue()
        self._full = False  # whether it was said
        # To be waited for: the join of a thread does not survive a signal that raises.
        # Source: github.com/python/cpython, issue 90882, of Python 3.11 among others.
        self._over = threading.Event()
        self._tracker: Tracker | None = None
        try:
            self._tracker = tracker = kind(about)
        except Exception as error:
            self._fail(error)
            self._over.set()
            return
        # A daemon: a network that hangs keeps no process from its end.
        threading.Thread(
            target=self._work, args=(tracker,), name=f"--track {name}", daemon=True
        ).start()

    def put(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics; never waits, so one that is too many is left out."""
        if self._over.is_set():
            return
        if self._rows.qsize() < _MOST_ROWS:
            self._rows.put(row)
        elif not self._full:
            self._full = True
            logger.warning(
                "--track %s misses rows from here on, as %d wait for it; metrics.jsonl has all",
                self.name,
                _MOST_ROWS,
            )

    def end(self, status: str) -> None:
        """No more rows come.

        Args:
            status: of the run, as in summary.json.
        """
        self._rows.put(status)  # however many rows wait

    def wait(self, seconds: float) -> bool:
        """Until all rows have arrived, at most so long; whether they have, or it has failed."""
        return self._over.wait(seconds)

    def abandon(self) -> None:
        """Wait no more for what has not arrived."""
        if self._tracker is None or self._over.is_set():
            return
        try:
            self._tracker.abandon()
        except Exception as error:
            logger.warning(
                "--track %s may keep this process from its end: %s", self.name, _reason(error)
            )

    def _work(self, tracker: Tracker) -> None:
        try:
            tracker.open()
            while not isinstance(item := self._rows.get(), str):
                row = dict(item)
                step, seconds = row.pop("step"), row.pop("time")
                tracker.log(step, seconds, row)
            tracker.close(item)
        except Exception as error:  # of any kind: the packages are not ours
            self._fail(error)
        finally:
            self._over.set()

    def _fail(self, error: Exception) -> None:
        logger.error(
            "--track %s gets no rows from here on, metrics.jsonl has all of them: %s",
            self.name,
            _reason(error),
        )


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
