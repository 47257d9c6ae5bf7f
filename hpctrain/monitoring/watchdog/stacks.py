"""Stacks of all threads of a rank, written by its faulthandler after a signal.

The faulthandler is C code in a signal handler, so it works while C code holds the GIL. It does not
work under a debugger, or while the kernel blocks signals (state D).
"""

import os
import signal
import time
from collections.abc import Mapping

from hpctrain.monitoring.watchdog.processes import WatchedProcess

__all__ = ["SIGNAL", "collect"]

# Not used by Python, the C library (32, 33 and below SIGRTMIN) or torch (USR2).
SIGNAL = signal.SIGRTMIN + 10

_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.005
_MOST_BYTES = 1 << 20


def collect(processes: Mapping[int, WatchedProcess]) -> dict[int, str]:
    """Return the stacks of the ranks; empty for a rank that does not respond.

    Args:
        processes: processes by the descriptor of the file into which the rank writes.
    """
    stopped = {file: process for file, process in processes.items() if process.state() == "T"}
    running = {file: process for file, process in processes.items() if file not in stopped}
    for process in running.values():
        process.send(SIGNAL)
    _wait(running)
    # A stopped process writes no stack, so it continues for the few milliseconds of the write.
    for process in stopped.values():
        process.send(SIGNAL)
        process.send(signal.SIGCONT)
    _wait(stopped)
    for process in stopped.values():
        process.send(signal.SIGSTOP)
    return {file: _text(file) for file in processes}


def _wait(processes: Mapping[int, WatchedProcess]) -> None:
    """Wait until all processes have finished writing, at most two seconds."""
    end = time.monotonic() + _SECONDS
    before: dict[int, str] = {}
    while time.monotonic() < end:
        now = {file: _text(file) for file, process in processes.items() if process.state()}
        if now == before and all(now.values()):
            return
        before = now
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _text(file: int) -> str:
    return os.pread(file, _MOST_BYTES, 0).decode(errors="replace")
