"""Files that are read again and again: a limited number of them is open at a time."""

import contextlib
import errno
import os
import resource
from collections import OrderedDict
from pathlib import Path

from hpctrain.errors import DataError

__all__ = ["Descriptors", "make_room"]

# ImageNet has more tar files than the 1,024 files that a process may usually have open, and each
# loader process of each rank of a host reads from all of them.
_MOST = 128


class _File:
    """A descriptor, which is closed when nobody has it any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            with contextlib.suppress(OSError):
                os.close(self.number)


class Descriptors:
    """Up to 128 open files, those that were read last; in each process those that it has opened.

    Threads may read at once, and processes after a fork as well, as no position is used.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _File] = OrderedDict()

    def read(self, path: Path, size: int, start: int) -> bytes:
        """A part of a file, less where it ends before.

        Raises:
            DataError: it cannot be read, or too many files are open.
        """
        try:
            # The name keeps it open while another thread may drop it here.
            file = self._files.pop(path, None) or _File(path)
            self._files[path] = file
            if len(self._files) > _MOST:
                self._files.popitem(last=False)  # in one step, for the threads' sake
            return os.pread(file.number, size, start)
        except OSError as error:
            raise _unreadable(path, error) from None

    def __getstate__(self) -> dict[str, object]:
        return {"_files": OrderedDict()}


def make_room(files: int) -> None:
    """Raise the limit on open files for so many of them, as far as the system's own allows.

    Processes that are started later have it as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + min(files, _MOST)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _unreadable(path: Path, error: OSError) -> DataError:
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return DataError(
            f"{path} cannot be read: this process has {soft} files open, and may not open more",
            f"room for {_MOST} tar files beside what else is open",
            f"ulimit -n {hard}    before the ranks start"
            if hard > soft
            else "ask for a higher limit (LimitNOFILE of slurmd, /etc/security/limits.conf)",
        )
    return DataError(
        f"{path} cannot be read: {error.strerror}",
        "the tar files that were there when the run began",
    )
