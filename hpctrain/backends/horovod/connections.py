"""The connections that Horovod opened, so that after a failure the waits on them can be ended.

Horovod's thread waits in gloo for a peer that is gone, until gloo's time-out. Only the end of the
connection wakes it earlier. Linux lists the open files of a process in /proc/self/fd.
"""

import contextlib
import os
import socket
import stat

__all__ = ["Connections"]


class Connections:
    """The TCP connections that a process opens between `__enter__` and `__exit__`.

    Args:
        excluded_port: port to exclude; connections from or to it do not belong to Horovod's ranks.
    """

    def __init__(self, excluded_port: int) -> None:
        self._excluded_port = excluded_port
        self._before: set[int] = set()
        self._found: dict[int, tuple[object, object]] = {}

    def __enter__(self) -> None:
        self._before = _open_files()

    def __exit__(self, *error: object) -> None:
        for number in _open_files() - self._before:
            ends = _ends(number)
            if ends is not None and not any(self._excluded_port in end[1:2] for end in ends):
                self._found[number] = ends

    def cut(self) -> None:
        """Shut down the connections: every wait for data on them ends with an error."""
        for number, ends in self._found.items():
            if _ends(number) == ends:  # the number is not reused
                with (
                    contextlib.suppress(OSError),
                    socket.socket(fileno=os.dup(number)) as duplicate,
                ):
                    duplicate.shutdown(socket.SHUT_RDWR)


def _open_files() -> set[int]:
    listed = os.listdir("/proc/self/fd")
    # Without the file of the listing itself, which is closed.
    return {int(name) for name in listed if os.path.lexists(f"/proc/self/fd/{name}")}


def _ends(number: int) -> tuple[tuple[object, ...], tuple[object, ...]] | None:
    """Return both ends of a TCP connection, or None for any other file."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        with socket.socket(fileno=os.dup(number)) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return duplicate.getsockname(), duplicate.getpeername()
    except OSError:  # closed by now, or it only listens
        return None
