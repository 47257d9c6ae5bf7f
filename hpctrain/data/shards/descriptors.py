"""Cache of open files that are read repeatedly, with a limit on their number."""

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
    """File descriptor that is closed when no reference is left."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if "number" in self.__dict__:
            with contextlib.suppress(OSError):
                os.close(self.number)


class Descriptors:
    """Cache of up to 128 open files, the most recently read ones, in each process.

    Threads, and processes after a fork, may read at the same time, because reads use no file
    position.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _File] = OrderedDict()

    def read(self, path: Path, size: int, start: int) -> bytes:
        """Return a part of a file; fewer bytes if the file ends before.

        Raises:
            DataError: the file cannot be read, or too many files are open.
        """
        try:
            # The local reference keeps it open if another thread drops it from the cache.
            file = self._files.pop(path, None) or _File(path)
            self._files[path] = file
            if len(self._files) > _MOST:
                self._files.popitem(last=False)  # atomic, for other threads
            return os.pread(file.number, size, start)
        except OSError as error:
            raise _unreadable(path, error) from None

    def __getstate__(self) -> dict[str, object]:
        return {"_files": OrderedDict()}


def make_room(files: int) -> None:
    """Raise the limit on open files by this number, up to the system's hard limit.

    Processes that are started later inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    limit = soft + min(files, _MOST)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _unreadable(path: Path, error: OSError) -> DataError:
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return DataError(
            "HT512",
            f"{path} cannot be read: this process has {soft} files open, and may not open more",
            f"a limit that allows {_MOST} tar files in addition to the other open files",
            f"ulimit -n {hard} (before the ranks start)"
            if hard > soft
            else "ask for a higher limit (LimitNOFILE of slurmd, /etc/security/limits.conf)",
        )
    return DataError(
        "HT511",
        f"{path} cannot be read: {error.strerror}",
        "the tar files that were there when the run began",
    )
