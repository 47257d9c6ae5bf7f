"""Writing of files and folders that waits until the data are on the disk."""

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

__all__ = ["BLOCK", "name_of", "sync", "write", "write_data", "write_text"]

# Bytes of a data file that have a hash of their own, so that a reader can check a part of it.
BLOCK = 1 << 22

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


def name_of(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"rank-{rank:05d}.bin"


def write_data(path: Path, sources: Iterable[Tensor], alignment: int) -> dict[str, Any]:
    """Write bytes one after the other, wait for the disk, and return size and hashes of the file.

    Args:
        path: new file.
        sources: tensors of type uint8.
        alignment: each of them begins at a multiple of this.

    Raises:
        OSError: the file could not be written.
    """
    hashes, size = [hashlib.sha256()], 0
    with open(path, "xb", buffering=_PIECE) as file:
        for source in sources:
            for data in (source.cpu().numpy(), bytes(-source.numel() % alignment)):
                view = memoryview(data)  # type: ignore[arg-type]
                begin = 0
                while begin < len(view):
                    if size == BLOCK * len(hashes):
                        hashes.append(hashlib.sha256())
                    piece = view[begin : begin + min(_PIECE, BLOCK * len(hashes) - size)]
                    hashes[-1].update(piece)
                    file.write(piece)
                    size, begin = size + len(piece), begin + len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "blocks": [one.hexdigest() for one in hashes] if size else []}


def write_text(path: Path, text: str) -> None:
    """Write a text to a new file, and wait for the disk.

    Raises:
        OSError: the file could not be written.
    """
    with open(path, "x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


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
