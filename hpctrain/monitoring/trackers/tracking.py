"""All trackers of a run, each with a thread, so that no step waits for a network."""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from hpctrain.cluster.texts import first_line
from hpctrain.errors import exit_codes
from hpctrain.monitoring.trackers.base import About, Tracker
from hpctrain.process.logging import logger

__all__ = ["Tracking"]

# Maximum number of rows that wait for a hanging tracker; each has some hundred bytes.
_MOST_ROWS = 100_000
# Time for networks at the end of a run. A run that is asked to stop may be killed at any moment,
# and still has to write its exit status file.
_SECONDS_AT_THE_END, _SECONDS_TO_STOP = 30.0, 3.0
# Share of the time-out after which the waiting other ranks consider this rank lost.
_PART_OF_THE_TIMEOUT = 0.25
# Shorter waits are not logged.
_SECONDS_UNLOGGED = 1.0


class Tracking:
    """All trackers of a run; used on rank 0 only.

    A tracker that fails is logged once, and neither ends nor slows the training.

    Args:
        kinds: class of each tracker by name.
        about: description of the run.
    """

    def __init__(self, kinds: Mapping[str, type[Tracker]], about: About) -> None:
        self._outlets = [_Outlet(name, kind, about) for name, kind in kinds.items()]

    def row(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics.jsonl."""
        for outlet in self._outlets:
            outlet.put(row)

    def close(self, status: str, timeout: float) -> None:
        """End all trackers and wait for them, with one time limit for all; a signal ends the wait.

        Args:
            status: status of the run, as in summary.json.
            timeout: seconds after which other ranks consider this rank lost.
        """
        for outlet in self._outlets:
            outlet.rows.put(status)  # even if there are too many rows
        done = status == exit_codes.STATUS[exit_codes.DONE]
        limit = _SECONDS_AT_THE_END if done else _SECONDS_TO_STOP
        seconds = min(limit, timeout * _PART_OF_THE_TIMEOUT)
        begun = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # raised by signal handlers
            late = self._late(begun + min(seconds, _SECONDS_UNLOGGED))
            if late and seconds > _SECONDS_UNLOGGED:
                logger.info("waiting up to %.0f s for --track %s; Ctrl-C ends it", seconds, late)
                self._late(begun + seconds)
        if late := self._late(begun):
            logger.warning(
                "--track %s has not taken all rows within %.0f s; metrics.jsonl has them",
                *(late, time.monotonic() - begun),
            )
        for outlet in self._outlets:
            outlet.abandon()

    def _late(self, end: float) -> str:
        """Return the names of trackers that do not finish until a time of `time.monotonic`."""
        for outlet in self._outlets:
            outlet.finished.wait(max(0.0, end - time.monotonic()))
        return ",".join(one.name for one in self._outlets if not one.finished.is_set())


class _Outlet:
    """A tracker with its thread and its queue of rows.

    Attributes:
        name: name of the tracker in `--track`.
        rows: rows that wait, and at last the status of the run.
        finished: set when the tracker has finished or failed.
    """

    def __init__(self, name: str, kind: type[Tracker], about: About) -> None:
        self.name = name
        self.rows: queue.SimpleQueue[Mapping[str, Any] | str] = queue.SimpleQueue()
        # An event, because a signal handler that raises breaks the join of a thread.
        # Source: github.com/python/cpython, issue 90882, of Python 3.11 among others.
        self.finished = threading.Event()
        self._full = False  # whether the full queue was logged
        try:
            self._tracker = kind(about)
        except Exception as error:
            self._fail(error)
            return
        # Daemon thread: a hanging network does not block the exit of the process.
        threading.Thread(target=self._work, name=f"--track {name}", daemon=True).start()

    def put(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics without waiting; drop it if the queue is full."""
        if self.finished.is_set():
            return
        if self.rows.qsize() < _MOST_ROWS:
            self.rows.put(row)
        elif not self._full:
            self._full = True
            logger.warning(
                "--track %s loses rows from here on, because %d rows wait; metrics.jsonl has all",
                *(self.name, _MOST_ROWS),
            )

    def abandon(self) -> None:
        """Give up rows that were not sent, so that the process can exit."""
        if self.finished.is_set():
            return
        try:
            self._tracker.abandon()
        except Exception as error:
            logger.warning(
                "--track %s may block the exit of this process: %s", self.name, first_line(error)
            )

    def _work(self) -> None:
        try:
            self._tracker.open()
            while not isinstance(item := self.rows.get(), str):
                row = dict(item)
                step, seconds = row.pop("step"), row.pop("time")
                self._tracker.log(step, seconds, row)
            self._tracker.close(item)
            self.finished.set()
        except Exception as error:  # third-party packages raise any type
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.error(
            "--track %s gets no rows from here on, metrics.jsonl has all of them: %s",
            *(self.name, first_line(error)),
        )
        self.finished.set()
