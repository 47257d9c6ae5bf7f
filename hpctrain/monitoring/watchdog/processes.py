"""State of a process, from proc(5) and pidfd_open(2)."""

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
    """Return the number of this process's pid namespace; 0 if the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks; with its id, it identifies the process.

    Raises:
        OSError: there is no such process.
    """
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter and the start time of a process."""
    # The name in parentheses may contain any characters.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


@dataclass(slots=True)
class Process:
    """A watched process, distinct from a later process with the same id.

    Args:
        pid: process id.
        started: `start_time` of the process.
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
            state, started = _stat(self.pid)
        except OSError:
            return ""
        return state if started == self.started and state not in "ZX" else ""

    def waits_in(self) -> str:
        """Return the kernel function in which the process waits; empty if unknown."""
        try:
            name = Path(f"/proc/{self.pid}/wchan").read_text().strip()
        except OSError:
            return ""
        return name if name != "0" else ""

    def send(self, number: int) -> None:
        """Send a signal to the process; do nothing if it has ended."""
        if self.state():
            try:
                os.kill(self.pid, number)
            except OSError:  # the process has just ended
                return
