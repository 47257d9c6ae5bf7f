"""Files that are on the disk when they are said to be."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

__all__ = ["sync", "write"]

# A piece is hashed and written while it is in the processor's cache.
_PIECE = 1 << 20


class _Hashing:
    """Takes what torch.save writes: on to a file, and to its hash.

    An exception would have to pass through torch's C++, so the first error is kept for later and
    nothing more is written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        """All of it, or nothing more after an error."""
        view = memoryview(data)
        try:
            for start in range(0, len(view) if self.error is None else 0, _PIECE):
                piece = view[start : start + _PIECE]
                self.sha256.update(piece)
                self._file.write(piece)
        except (OSError, ValueError, MemoryError) as error:
            self.error = error
        return len(view)

    def flush(self) -> None:
        """When all is written."""


def write(path: Path, value: Any) -> dict[str, Any]:
    """Write a value as `torch.save` does and wait for the disk; its size and hash.

    Raises:
        OSError: it could not be written.
        RuntimeError: torch could not, for a reason of its own.
    """
    with open(path, "xb", buffering=_PIECE) as file:
        hashing = _Hashing(file)
        torch.save(value, cast(BinaryIO, hashing))
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
        return {"size": file.tell(), "sha256": hashing.sha256.hexdigest()}


def sync(folder: Path) -> None:
    """Let the names in a folder reach the disk.

    Raises:
        OSError: they do not.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems without such a call
            raise
    finally:
        os.close(descriptor)
