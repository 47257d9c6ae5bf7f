"""What a tracker is: it shows the rows of a run somewhere else."""

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
    """What trackers are told of a run.

    Attributes:
        name: of the run: that of its script.
        directory: of the run.
        options: by name.
        step: at which this start goes on.
    """

    name: str
    directory: RunDirectory
    options: Mapping[str, Any]
    step: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def known_as(self, tracker: str) -> str | None:
        """The name that an earlier start of this run has in a tracker."""
        known = (self.directory.read(self.directory.tracked) or {}).get(tracker)
        return known if isinstance(known, str) else None

    def remember(self, tracker: str, name: str) -> None:
        """Keep the name of this run in a tracker for its next start.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            known = self.directory.read(self.directory.tracked) or {}
            known[tracker] = name
            rundir.replace(self.directory.tracked, json.dumps(known, indent=1) + "\n")


class Tracker(ABC):
    """One tracker. What it raises is said once, and then it gets no more rows.

    It is made in the main thread, where it imports its package: a process that is forked while
    another thread imports could wait for ever. All else it does in a thread of its own, so it may
    wait for a network.

    Args:
        about: the run.

    Attributes:
        package: to be imported.
    """

    package: ClassVar[str]

    @abstractmethod
    def __init__(self, about: About) -> None: ...

    @abstractmethod
    def open(self) -> None:
        """Begin, or go on with what an earlier start has begun; note the options."""

    @abstractmethod
    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """A row of metrics.

        Args:
            step: steps done.
            seconds: Unix time.
            values: by name, the epoch among them.
        """

    @abstractmethod
    def close(self, status: str) -> None:
        """End, when all rows are there.

        Args:
            status: of the run, as in summary.json.
        """

    def abandon(self) -> None:  # noqa: B027, as most leave nothing behind
        """Nobody waits for it any more: end what would keep this process from its own end."""
