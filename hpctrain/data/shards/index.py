"""Index of a split in tar files: the position of each image, and the tar files it belongs to.

SPLIT.index is JSON with `format` ("hpctrain shards 2"), `classes` (names), `shards` (name, bytes
and number of samples of each tar file, in order), `rows` (in base64, a row of 28 bytes for each
sample, little-endian, with the fields of `Row`) and `sum` (CRC-32 of the JSON of all this).
"""

import base64
import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from hpctrain import rundir
from hpctrain.errors import UsageError

__all__ = ["BLOCK", "Index", "Row", "Shard", "pack", "path_of", "shard_paths"]

BLOCK = 512  # bytes of a block of a tar file
_FORMAT = "hpctrain shards 2"
_ROW = struct.Struct("<QIIIII")


class Row(NamedTuple):
    """Position of a sample in its tar file.

    Attributes:
        start: offset of the first header of its image and its .cls.
        length: number of bytes from there to the end of both.
        at: number of bytes from there to the image's bytes.
        size: number of bytes of the image.
        target: class.
        sign: CRC-32 of all but the image's bytes: both headers, the .cls, and what is between them.
    """

    start: int
    length: int
    at: int
    size: int
    target: int
    sign: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Tar file of an index.

    Attributes:
        name: name of the file.
        bytes: size of the file, in bytes.
        samples: number of samples in the file.
    """

    name: str
    bytes: int
    samples: int


class Index:
    """Positions of the images of a split, in one block of memory, which processes share.

    Args:
        classes: names of the classes.
        shards: tar files, in the order of the samples.
        rows: a row for each sample, as bytes.

    Attributes:
        classes, shards: the arguments.
    """

    def __init__(self, classes: list[str], shards: list[Shard], rows: bytes) -> None:
        self.classes, self.shards, self._rows = classes, shards, rows

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def row(self, number: int) -> Row:
        """Return the position of a sample."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        return Row(*_ROW.unpack_from(self._rows, number * _ROW.size))

    def image(self, number: int, read: Callable[[int, int], bytes]) -> bytes | None:
        """Return an image, or None if its tar file is another one than that of the index.

        Args:
            number: number of the sample.
            read: function from a number of bytes and an offset to these bytes of the tar file;
                called once.
        """
        row = self.row(number)
        data, end = read(row.length, row.start), row.at + row.size
        fits = len(data) == row.length and zlib.crc32(data[: row.at] + data[end:]) == row.sign
        return data[row.at : end] if fits else None

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        content = {
            "format": _FORMAT,
            "classes": self.classes,
            "shards": [asdict(shard) for shard in self.shards],
            "rows": base64.b64encode(self._rows).decode(),
        }
        rundir.replace(path, json.dumps({**content, "sum": _sum(content)}))

    @classmethod
    def read(cls, path: Path) -> "Index":
        """Read the index of a file.

        Raises:
            UsageError: the file is damaged, or in another format.
        """
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"it has the format {content['format']}")
            if content.pop("sum") != _sum(content):
                raise ValueError("its checksum does not fit")
            shards = [Shard(**shard) for shard in content["shards"]]
            index = cls(content["classes"], shards, base64.b64decode(content["rows"]))
            if len(index) != sum(shard.samples for shard in shards):
                raise ValueError("it has not one row for each sample")
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "HT521",
                f"{path} is damaged: {error}",
                "an index of `hpctrain shards`",
                f"rm {path} && hpctrain shards index {path.parent}",
            ) from None
        return index


def _sum(content: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def pack(row: Row) -> bytes:
    """Return the bytes of a row."""
    return _ROW.pack(*row)


def path_of(folder: Path, split: str) -> Path:
    """Return the path of a split's index."""
    return folder / f"{split}.index"


def shard_paths(folder: Path, split: str) -> list[Path]:
    """Return the tar files of a split, in order."""
    pattern = re.compile(re.escape(split) + r"-\d+\.tar")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
