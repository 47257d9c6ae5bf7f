"""State of a process, from proc(5) and pidfd_open(2)."""

import os
from dataclasses import dataclass

from hpctrain.cluster import proc

__all__ = ["WatchedProcess"]

STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel",
    "T": "is stopped",
    "t": "is held by a debugger",
}


@dataclass(slots=True)
class WatchedProcess:
    """A watched process, distinct from a later process with the same id.

    Args:
        pid: process id.
        started: `Stat.started` of the process.
        handle: file descriptor that becomes readable when the process ends; set automatically.
    """

    pid: int
    started: int
    handle: int | None = None

    def __post_init__(self) -> None:
        try:
            # Linux before 5.3 has no pidfd; then the helper only polls the state.
            self.handle = os.pidfd_open(self.pid)
        except OSError:
            self.handle = None

    def state(self) -> str:
        """Return the state letter of proc(5); empty if the process has ended."""
        try:
            now = proc.stat(self.pid)
        except OSError:
            return ""
        return now.state if now.started == self.started else ""

    def waits_in(self) -> str:
        """Return the kernel function in which the process waits; empty if unknown."""
        name = proc.text(f"{self.pid}/wchan")
        return name if name != "0" else ""

    def send(self, number: int) -> None:
        """Send a signal to the process; do nothing if it has ended."""
        if self.state():
            try:
                os.kill(self.pid, number)
            except OSError:  # the process has just ended
                return
