"""Writing of files and folders that waits until the data are on the disk."""

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
    """File object for torch.save that writes to a file and computes its hash.

    An exception would have to pass through torch's C++ code. So the first error is stored and
    nothing more is written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        """Write and hash all data; write nothing more after an error."""
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
        """Do nothing; `torch.save` needs this method."""


def write(path: Path, value: Any) -> dict[str, Any]:
    """Write a value with `torch.save`, wait for the disk and return size and hash of the file.

    Raises:
        OSError: the file could not be written.
        RuntimeError: torch could not write the value.
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
    """Write the names in a folder to the disk.

    Raises:
        OSError: the names could not be written.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems without this call
            raise
    finally:
        os.close(descriptor)
