"""What the system says of a process: proc(5) and pidfd_open(2)."""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "namespace", "start_time"]

STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits in the kernel",
    "T": "is stopped",
    "t": "is held by a debugger",
}


def namespace() -> int:
    """The number of the pid namespace of this process; 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """When a process began, in the system's clock ticks; with its id it names it for all time.

    Raises:
        OSError: there is no such process.
    """
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, int]:
    """The letter of its state, and when it began."""
    # The name in parentheses may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


@dataclass(slots=True)
class Process:
    """A process that is watched, and cannot be mistaken for a later one with the same id.

    Args:
        pid: its id.
        started: its `start_time`.
    """

    pid: int
    started: int
    handle: int | None = None

    def __post_init__(self) -> None:
        try:
            # Readable when the process ends. Linux before 5.3 has none: then it is only looked at.
            self.handle = os.pidfd_open(self.pid)
        except OSError:
            self.handle = None

    def state(self) -> str:
        """The letter that proc(5) has for it; empty where it has ended."""
        try:
            state, started = _stat(self.pid)
        except OSError:
            return ""
        return state if started == self.started and state not in "ZX" else ""

    def waits_in(self) -> str:
        """The kernel's function in which it waits; empty where that is unknown."""
        try:
            name = Path(f"/proc/{self.pid}/wchan").read_text().strip()
        except OSError:
            return ""
        return name if name != "0" else ""

    def send(self, number: int) -> None:
        """Send it a signal; where it has ended nothing happens."""
        if self.state():
            try:
                os.kill(self.pid, number)
            except OSError:  # it has just ended
                return
