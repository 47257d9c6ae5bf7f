"""Thread and queue of a tracker: the queue accepts rows immediately, the thread sends them."""

import queue
import threading
from collections.abc import Mapping
from typing import Any

from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.process.logging import logger

__all__ = ["Outlet"]

# Maximum number of rows that wait for a hanging tracker; each has some hundred bytes.
_MOST_ROWS = 100_000


class Outlet:
    """A tracker with its thread and its queue of rows.

    Args:
        name: name of the tracker in `--track`.
        kind: class of the tracker.
        about: description of the run.

    Attributes:
        name: name of the tracker in `--track`.
    """

    def __init__(self, name: str, kind: type[Tracker], about: About) -> None:
        self.name = name
        self._rows: queue.SimpleQueue[Mapping[str, Any] | str] = queue.SimpleQueue()
        self._full = False  # whether the full queue was logged
        # `wait` uses an event, because a signal handler that raises breaks the join of a thread.
        # Source: github.com/python/cpython, issue 90882, of Python 3.11 among others.
        self._finished = threading.Event()
        self._tracker: Tracker | None = None
        try:
            self._tracker = tracker = kind(about)
        except Exception as error:
            self._fail(error)
            self._finished.set()
            return
        # Daemon thread: a hanging network does not block the exit of the process.
        threading.Thread(
            target=self._work, args=(tracker,), name=f"--track {name}", daemon=True
        ).start()

    def put(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics without waiting; drop it if the queue is full."""
        if self._finished.is_set():
            return
        if self._rows.qsize() < _MOST_ROWS:
            self._rows.put(row)
        elif not self._full:
            self._full = True
            logger.warning(
                "--track %s loses rows from here on, because %d rows wait; metrics.jsonl has all",
                self.name,
                _MOST_ROWS,
            )

    def end(self, status: str) -> None:
        """Pass on the end of the rows.

        Args:
            status: status of the run, as in summary.json.
        """
        self._rows.put(status)  # even if the queue is full

    def wait(self, seconds: float) -> bool:
        """Wait at most some seconds; return whether the tracker has finished or failed."""
        return self._finished.wait(seconds)

    def abandon(self) -> None:
        """Give up rows that were not sent, so that the process can exit."""
        if self._tracker is None or self._finished.is_set():
            return
        try:
            self._tracker.abandon()
        except Exception as error:
            logger.warning(
                "--track %s may block the exit of this process: %s", self.name, _reason(error)
            )

    def _work(self, tracker: Tracker) -> None:
        try:
            tracker.open()
            while not isinstance(item := self._rows.get(), str):
                row = dict(item)
                step, seconds = row.pop("step"), row.pop("time")
                tracker.log(step, seconds, row)
            tracker.close(item)
        except Exception as error:  # third-party packages raise any type
            self._fail(error)
        finally:
            self._finished.set()

    def _fail(self, error: Exception) -> None:
        logger.error(
            "--track %s gets no rows from here on, metrics.jsonl has all of them: %s",
            self.name,
            _reason(error),
        )


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
