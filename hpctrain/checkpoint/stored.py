"""Tensors in the data files of a checkpoint, of which a rank reads what it needs.

Of a file, whole blocks are read, because each of them has a hash. Each block is read once.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from hpctrain.checkpoint.durable_files import BLOCK, name_of
from hpctrain.cluster import system
from hpctrain.errors import CheckpointError
from hpctrain.rundir import open_regular

__all__ = ["DataReader", "Stored", "dtype_of", "open_file"]

_Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


def dtype_of(name: str) -> torch.dtype:
    """Return the data type of a name such as `float32`.

    Raises:
        AttributeError: torch has no such type.
    """
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise AttributeError(f"torch.{name} is no data type")
    return dtype


def open_file(path: Path) -> BufferedReader:
    """Open a regular file that is no link, because a read of a pipe or device may never end.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    return open(path, "rb", opener=lambda name, flags: open_regular(name, flags | os.O_NOFOLLOW))


class DataReader:
    """Reader of the data files of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        files: size and hashes of each file, from the manifest.
    """

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        self._folder, self._files = folder, files
        # By file and block: where in the block, and the memory for it.
        self._wanted: dict[str, dict[int, list[tuple[int, _Bytes]]]] = {}

    def want(self, name: str, offset: int, memory: _Bytes) -> None:
        """Fill memory from a file at the next `read`."""
        blocks = self._wanted.setdefault(name, {})
        while len(memory):
            number, at = divmod(offset, BLOCK)
            size = min(len(memory), BLOCK - at)
            blocks.setdefault(number, []).append((at, memory[:size]))
            offset, memory = offset + size, memory[size:]

    def read(self) -> None:
        """Read all that is wanted.

        Raises:
            CheckpointError: a file has changed since it was written, or cannot be read.
        """
        with ThreadPoolExecutor(len(system.cores())) as threads:
            for name, blocks in sorted(self._wanted.items()):
                path, entry = self._folder / name, self._files[name]
                try:
                    with open_file(path) as file:
                        if os.fstat(file.fileno()).st_size != entry["size"]:
                            raise _changed(path)
                        jobs = [
                            threads.submit(
                                _fill, path, file.fileno(), number, entry["blocks"][number], own
                            )
                            for number, own in sorted(blocks.items())
                        ]
                        for job in jobs:
                            job.result()
                except OSError as error:
                    raise CheckpointError("HT707.unreadable", path=path, error=error) from None
        self._wanted.clear()


class Stored:
    """A tensor in the data files.

    Args:
        reader: reader of the files.
        entry: entry of the manifest.

    Attributes:
        name: path of the tensor in its part.
        shape, dtype: those of the tensor.
    """

    def __init__(self, reader: DataReader, entry: Mapping[str, Any]) -> None:
        self._reader, self._pieces = reader, entry.get("pieces", ())
        self.name = entry["name"]
        self.shape, self.dtype = torch.Size(entry["shape"]), dtype_of(entry["dtype"])
        self._order = entry.get("order")
        self._part: tuple[int, int] | None = None
        self._convert: Callable[[Tensor], Tensor] | None = None

    def divide(self, start: int, stop: int, convert: Callable[[Tensor], Tensor]) -> None:
        """Let a rank read only a part of the tensor.

        Args:
            start, stop: first element to read, and the one after the last, in row-major order.
            convert: function of these elements, of shape (stop - start,), which returns what takes
                the place of the tensor in the state.
        """
        self._part, self._convert = (start, stop), convert

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """Return memory that is filled at the next `DataReader.read`, for `converted`."""
        if self._part is not None and self._order is None:
            return self._range(*self._part)
        flat = self._range(0, math.prod(self.shape))
        if self._order is None:
            return flat.view(self.shape)
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return flat.view([self.shape[n] for n in self._order]).permute(inverse)

    def converted(self, values: Tensor) -> Tensor:
        """Return what takes the place of the tensor in the state.

        Args:
            values: result of `tensor`, filled.
        """
        if self._part is None or self._convert is None:
            return values
        if self._order is not None:
            values = values.reshape(-1)[slice(*self._part)].clone()
        return self._convert(values)

    def _range(self, start: int, stop: int) -> Tensor:
        """Return the elements of a range, in the order of memory."""
        item = self.dtype.itemsize
        values = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        memory = values.view(torch.uint8).numpy()
        for rank, offset, first, count in self._pieces:
            begin, end = max(start, first), min(stop, first + count)
            if begin < end:
                own = memory[(begin - start) * item : (end - start) * item]
                self._reader.want(name_of(rank), offset + (begin - first) * item, own)
        return values


def _fill(
    path: Path, descriptor: int, number: int, sha256: str, wanted: list[tuple[int, _Bytes]]
) -> None:
    """Read a block, check its hash, and copy what is wanted from it."""
    block = bytearray()
    while len(block) < BLOCK:
        piece = os.pread(descriptor, BLOCK - len(block), number * BLOCK + len(block))
        if not piece:
            break
        block += piece
    if hashlib.sha256(block).hexdigest() != sha256:
        raise _changed(path)
    view = numpy.frombuffer(block, numpy.uint8)
    for at, memory in wanted:
        memory[:] = view[at : at + len(memory)]


def _changed(path: Path) -> CheckpointError:
    return CheckpointError("HT707.changed", path=path)
