"""Program that waits for the first client of a listening socket, and then starts its server.

    python store_starter.py PARENT_PID FD COMMAND… [-- FD COMMAND…]…

The command gets the number of the file descriptor as its last argument. So a server that has to
import torch costs nothing in a start that does not need it. Each start of a server is a line on
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
    commands = {}
    words = sys.argv[2:]
    while words:
        end = words.index("--") if "--" in words else len(words)
        commands[int(words[0])] = words[1:end]
        words = words[end + 1 :]
    me = os.getpid()
    while commands:
        ready, _, _ = select.select(list(commands), [], [])
        for descriptor in ready:
            command = commands.pop(descriptor)
            with contextlib.suppress(OSError):  # the reader is gone
                os.write(1, b"used\n")
            if os.fork() == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                _end_with(me)
                os.set_inheritable(descriptor, True)
                with contextlib.suppress(OSError):
                    os.execvp(command[0], [*command, str(descriptor)])  # noqa: S606
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
