"""Writing of files and folders that waits until the data are on the disk."""

import errno
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["BLOCK", "name_of", "sync", "write", "write_bytes", "write_data"]

# Bytes of a data file that have a hash of their own, so that a reader can check a part of it.
BLOCK = 1 << 22

# Elements begin at multiples of this, so that a reader may map the file.
_ALIGNMENT = 16
# A piece is hashed and written while it is in the processor's cache.
_PIECE = 1 << 20


def write(path: Path, value: Any) -> dict[str, Any]:
    """Write a value with `torch.save`, wait for the disk and return size and hash of the file.

    The value is small: its large tensors are in the data files.

    Raises:
        OSError: the file could not be written.
        RuntimeError: torch could not write the value.
    """
    memory = io.BytesIO()
    torch.save(value, memory)
    content = memory.getbuffer()
    write_bytes(path, content)
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def name_of(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"rank-{rank:05d}.bin"


def write_data(path: Path, sources: Sequence[Tensor]) -> tuple[dict[str, Any], list[int]]:
    """Write bytes one after the other, and wait for the disk.

    Args:
        path: new file.
        sources: tensors of type uint8.

    Returns:
        Size and hashes of the file, and the offset of each tensor in it.

    Raises:
        OSError: the file could not be written.
    """
    hashes, size = [hashlib.sha256()], 0
    offsets = []
    with open(path, "xb", buffering=_PIECE) as file:
        for source in sources:
            offsets.append(size)
            for data in (source.cpu().numpy(), bytes(-source.numel() % _ALIGNMENT)):
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
    blocks = [one.hexdigest() for one in hashes] if size else []
    return {"size": size, "blocks": blocks}, offsets


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a new file, and wait for the disk.

    Raises:
        OSError: the file could not be written.
    """
    with open(path, "xb") as file:
        file.write(content)
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
