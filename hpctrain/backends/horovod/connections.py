"""The connections that Horovod opened, so that after a failure the waits on them can be ended.

Horovod's thread waits in gloo for a peer that is gone, until gloo's time-out. Only the end of the
connection wakes it earlier. Linux lists the open files of a process in /proc/self/fd, sockets with
a number that is not used again.
"""

import contextlib
import os
import socket

__all__ = ["Connections"]


class Connections:
    """The TCP connections that a process opens between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._opened: set[str] = set()

    def __enter__(self) -> None:
        self._before = set(_sockets())

    def __exit__(self, *error: object) -> None:
        self._opened = set(_sockets()) - self._before

    def cut(self) -> None:
        """Shut down the connections: every wait for data on them ends with an error."""
        for name, number in _sockets().items():
            if name in self._opened:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6):
                        end.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    """Return the file descriptor of each open socket, by its name, such as "socket:[4711]"."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now, such as the listing itself
            found[os.readlink(f"/proc/self/fd/{number}")] = int(number)
    return {name: number for name, number in found.items() if name.startswith("socket:")}
