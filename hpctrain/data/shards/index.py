"""Index of a split in tar files: the position of each image, and the tar files it belongs to.

SPLIT.index is JSON with `format` ("hpctrain shards 2"), `classes` (names), `shards` (name, bytes
and number of samples of each tar file, in order), `rows` (in base64, a row of 28 bytes for each
sample, little-endian, with the fields of `Row`) and `sum` (CRC-32 of the JSON of all this).

`build_index` makes it from the headers of WebDataset's tar files of KEY.jpg and KEY.cls. Source:
"The WebDataset Format" in the documentation of WebDataset. The files of one sample follow each
other, and their paths are equal up to the first dot of the file name; `.cls` contains the number of
the class as text.
"""

import base64
import itertools
import json
import os
import re
import struct
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpctrain import rundir
from hpctrain.data.shards.folders import is_image
from hpctrain.errors import UsageError

__all__ = ["DAMAGE", "Index", "build_index", "path_of", "shard_paths"]

_BLOCK = 512  # bytes of a block of a tar file
_FORMAT = "hpctrain shards 2"
_ROW = struct.Struct("<QIIIII")
# Errors of tarfile for a damaged header: its own, and those for invalid or too large numbers and
# for names that are not UTF-8.
DAMAGE = (tarfile.TarError, ValueError, OverflowError, EOFError, MemoryError, struct.error)


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


def path_of(folder: Path, split: str) -> Path:
    """Return the path of a split's index."""
    return folder / f"{split}.index"


def shard_paths(folder: Path, split: str) -> list[Path]:
    """Return the tar files of a split, in order."""
    pattern = re.compile(re.escape(split) + r"-\d+\.tar")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def build_index(folder: Path, split: str) -> Index:
    """Make the index of tar files from their headers.

    Classes are named after the outermost folder of their images in the tar files; if that is not
    unique, after the innermost folder; else by their numbers.

    Raises:
        UsageError: a tar file is missing, damaged, or compressed, or has no images with classes.
    """
    rows, shards = bytearray(), []
    folders = defaultdict[int, set[str]](set)  # of each class in the tar files
    paths = shard_paths(folder, split)
    _refuse_gaps(paths)
    for path in paths:
        samples = 0
        try:
            with open(path, "rb") as file:
                for key, row in _samples(path, file):
                    rows += _ROW.pack(*row)
                    samples += 1
                    folders[row.target].add(os.path.dirname(key.removeprefix("./")))
        except DAMAGE as error:
            raise _damaged(path, str(error) or type(error).__name__) from None
        if not samples:
            raise UsageError("HT520", f"{path} has no images", "tar files of KEY.jpg and KEY.cls")
        shards.append(Shard(path.name, path.stat().st_size, samples))
    return Index(_names(folders), shards, bytes(rows))


def _refuse_gaps(paths: list[Path]) -> None:
    """Raise an error for a missing number; without an index, only the numbers can show a gap."""
    numbers = {int(path.stem.rpartition("-")[2]) for path in paths}
    missing = sorted(set(range(len(paths))) - numbers)
    if missing:
        raise UsageError(
            "HT513",
            f"number {missing[0]} is missing: there are {len(paths)} tar files such as {paths[0]}, "
            f"with numbers up to {max(numbers)}",
            "numbers from 0 on without a gap, or an index that lists the tar files",
            "copy it again",
            "rename the other files, if this file never existed",
        )


def _names(folders: Mapping[int, set[str]]) -> list[str]:
    """Return a unique name for each class: that of a folder, else its number."""
    count = max(folders) + 1
    for place in (0, -1):
        found = [
            {folder.split("/")[place] for folder in folders.get(number, {str(number)})}
            for number in range(count)
        ]
        names = set[str]().union(*found) - {""}
        if len(names) == count == sum(map(len, found)):
            return [name for (name,) in found]
    return list(map(str, range(count)))


def _samples(path: Path, file: BinaryIO) -> Iterator[tuple[str, Row]]:
    """Yield key and position of each sample of a tar file."""
    for key, group in itertools.groupby(_files(path, file), lambda member: _split(member)[0]):
        members = list(group)
        images = [one for one in members if is_image(os.path.basename(one.name))]
        labels = []
        for member in members:
            if _split(member)[1] == "cls":
                text = os.pread(file.fileno(), min(member.size, _BLOCK), member.offset_data)
                # A class is an index in a list of names, so a larger number is invalid.
                if number := re.fullmatch(rb"0*(\d{1,7})", text.strip()):
                    labels.append((member.offset_data, int(number[1])))
        if len(images) != 1 or len(labels) != 1:
            raise UsageError(
                "HT520",
                f"{path}: {key} has {len(images)} images, and {len(labels)} .cls with the number "
                "of a class",
                "one image and one class in each sample; its files have the same name up to the "
                "first dot",
                "hpctrain shards make FOLDER TARGET (makes such tar files of a folder)",
            )
        (image,), ((label, target),) = images, labels
        begin = image.offset_data
        end = begin + image.size
        first, last = min(begin, label) - _BLOCK, max(end, label + _BLOCK)
        rest = os.pread(file.fileno(), begin - first, first)
        rest += os.pread(file.fileno(), last - end, end)
        row = Row(first, last - first, begin - first, image.size, target, zlib.crc32(rest))
        yield key, row


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the key of a file's sample, and the rest of the file's name."""
    folder, name = os.path.split(member.name)
    stem, _, suffix = name.partition(".")
    return os.path.join(folder, stem), suffix


def _files(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the files in a tar file, and check that each of them is there with all of its bytes."""
    end = 0
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            # tar stores a repeated file as a link, so a sample would be lost.
            if member.issparse() or not (member.isreg() or member.isdir()):
                raise UsageError(
                    "HT520",
                    f"{path}: {member.name} is a link or a device, or has holes (tar -S)",
                    "files alone, each with all of its bytes",
                    "tar --dereference --hard-dereference -cf … (makes such tar files)",
                )
            end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            if member.isreg():
                yield member
    # A tar file ends with two blocks of zeros, and zeros up to a full record of 20 blocks.
    most = (20 + 1) * _BLOCK
    rest = os.pread(file.fileno(), most + 1, end)
    if not _BLOCK <= len(rest) <= most or rest.strip(b"\0"):
        raise _damaged(
            path,
            f"its files end at byte {end:,} of {path.stat().st_size:,}: an incomplete copy, other "
            "data within it, or several tar files in one",
        )


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        "HT513",
        f"{path} is damaged: {why}",
        "one complete tar file, not compressed, in records of 10,240 bytes as tar makes them",
        "copy it again",
        "make it again with hpctrain shards make",
    )
