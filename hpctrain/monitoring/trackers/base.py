"""Interface of a tracker, which shows the rows of a run in another program."""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hpctrain import rundir
from hpctrain.rundir import RunDirectory

__all__ = ["About", "Tracker"]


@dataclass(frozen=True, slots=True)
class About:
    """Description of a run for trackers.

    Attributes:
        name: name of the run, that is of its script.
        directory: run directory.
        options: options of the run by name.
        step: step at which this start continues.
    """

    name: str
    directory: RunDirectory
    options: Mapping[str, Any]
    step: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def known_as(self, tracker: str) -> str | None:
        """Return the name of this run in a tracker from an earlier start; None without one."""
        known = (self.directory.read(self.directory.tracked) or {}).get(tracker)
        return known if isinstance(known, str) else None

    def remember(self, tracker: str, name: str) -> None:
        """Store the name of this run in a tracker for the next start.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            known = self.directory.read(self.directory.tracked) or {}
            known[tracker] = name
            rundir.replace(self.directory.tracked, json.dumps(known, indent=1) + "\n")


class Tracker(ABC):
    """Base class of trackers. An error is logged once, and then the tracker gets no more rows.

    The constructor runs in the main thread and imports the package: a process that is forked while
    another thread imports could wait forever. `open`, `log` and `close` run in a separate thread,
    so they may wait for a network. `abandon` runs in the main thread.

    Args:
        about: description of the run.

    Attributes:
        package: package that the tracker needs; it is checked before a run starts.
    """

    package: ClassVar[str] = ""

    @abstractmethod
    def __init__(self, about: About) -> None: ...

    @abstractmethod
    def open(self) -> None:
        """Begin a run in the tracker, or continue that of an earlier start; record the options."""

    @abstractmethod
    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Record a row of metrics.

        Args:
            step: steps done.
            seconds: Unix time.
            values: values by name, including the epoch.
        """

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run in the tracker, after all rows.

        Args:
            status: status of the run, as in summary.json.
        """

    def abandon(self) -> None:  # noqa: B027, as most trackers need no cleanup
        """Release what would block the exit of this process; the wait for the tracker is over."""
