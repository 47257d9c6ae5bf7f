"""The stack of every thread of a rank, which its own faulthandler writes when it is asked to.

That is C code in a signal handler, so it works while C code holds the GIL. Not under a debugger,
and not while the kernel lets no signal through (state D).
"""

import os
import signal
import time
from collections.abc import Mapping

from hpctrain.monitoring.watchdog.processes import Process

__all__ = ["SIGNAL", "collect"]

# Python and the C library (32, 33 and what SIGRTMIN leaves out) do not use it, nor torch (USR2).
SIGNAL = signal.SIGRTMIN + 10

_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.005
_MOST_BYTES = 1 << 20


def collect(processes: Mapping[int, Process]) -> dict[int, str]:
    """What the ranks have to show; empty for one that cannot.

    Args:
        processes: by the descriptor of the file into which the rank writes.
    """
    stopped = {file: one for file, one in processes.items() if one.state() == "T"}
    running = {file: one for file, one in processes.items() if file not in stopped}
    for process in running.values():
        process.send(SIGNAL)
    _wait(running)
    # A stopped process shows nothing, so it goes on for the milliseconds that this takes.
    for process in stopped.values():
        process.send(SIGNAL)
        process.send(signal.SIGCONT)
    _wait(stopped)
    for process in stopped.values():
        process.send(signal.SIGSTOP)
    return {file: _text(file) for file in processes}


def _wait(processes: Mapping[int, Process]) -> None:
    """Until all of them have written, and write no more; two seconds at the most."""
    end = time.monotonic() + _SECONDS
    before: dict[int, str] = {}
    while time.monotonic() < end:
        now = {file: _text(file) for file, one in processes.items() if one.state()}
        if now == before and all(now.values()):
            return
        before = now
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _text(file: int) -> str:
    return os.pread(file, _MOST_BYTES, 0).decode(errors="replace")
