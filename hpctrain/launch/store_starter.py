"""Program that waits for the first client of a listening socket, and then starts its server.

    python store_starter.py PARENT_PID [FD MODULE]…

Python runs the module, with the number of the file descriptor as its argument. So a server that has
to import torch costs nothing in a start that does not need it. Each start of a server is a line on
standard output. The program and its servers end with the parent. It needs only the standard
library.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def main() -> None:
    """Wait for clients, and start the servers."""
    parent = int(sys.argv[1])
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a scheduler sends them to all processes of a step
    modules = dict(zip(map(int, sys.argv[2::2]), sys.argv[3::2], strict=True))
    me = os.getpid()
    while modules:
        ready, _, _ = select.select(list(modules), [], [])
        for descriptor in ready:
            module = modules.pop(descriptor)
            with contextlib.suppress(OSError):  # the reader is gone
                os.write(1, b"used\n")
            if os.fork() == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                _end_with(me)
                os.set_inheritable(descriptor, True)
                with contextlib.suppress(OSError):
                    command = [sys.executable, "-m", module, str(descriptor)]
                    os.execv(sys.executable, command)  # noqa: S606
                os._exit(1)
            os.close(descriptor)
    while True:
        signal.pause()


def _end_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()
