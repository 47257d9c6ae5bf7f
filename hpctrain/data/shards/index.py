"""Index of a split in tar files: the position of each image, and the tar files it belongs to.

Format of SPLIT.index: a line `hpctrain shards 1`; a line with the digest of the rest; a line of
JSON with `classes` (names), `samples` (their number) and `shards` (for each, in order, `name`,
`bytes` and `samples`); then five arrays with a value for each sample: the offset of its bytes in
its tar file (uint64); the number of these bytes (uint32); its target (uint32); the number of blocks
of 512 bytes from the image's first block to the first block of its .cls (int32); and the CRC-32 of
the image's tar header, the .cls's tar header and the .cls's first block (uint32). All numbers are
little-endian.
"""

import hashlib
import json
import os
import re
import secrets
import sys
import zlib
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpctrain.errors import UsageError

__all__ = ["BLOCK", "Index", "Shard", "path_of", "shard_paths"]

BLOCK = 512  # bytes of a block of a tar file
_MAGIC = b"hpctrain shards 1\n"


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


@dataclass(slots=True)
class Index:
    """Positions of the images of a split.

    Attributes:
        classes: names of the classes.
        shards: tar files, in the order of the samples.
        offsets, sizes, targets: offset in the tar file, number of bytes, and class of each sample.
        labels: blocks from the begin of each image to the begin of its .cls.
        signs: checksum of the headers of each image and its .cls, and of the .cls.
    """

    classes: list[str] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    sizes: "array[int]" = field(default_factory=lambda: array("I"))
    targets: "array[int]" = field(default_factory=lambda: array("I"))

    labels: "array[int]" = field(default_factory=lambda: array("i"))
    signs: "array[int]" = field(default_factory=lambda: array("I"))

    def add(self, offset: int, size: int, target: int, label: int) -> None:
        """Add a sample of the next shard; `label` is the offset of its .cls."""
        self.offsets.append(offset)
        self.sizes.append(size)
        self.targets.append(target)
        self.labels.append((label - offset) // BLOCK)

    def end_shard(self, path: Path) -> None:
        """Add a tar file that is written and whose samples have been added."""
        first = len(self.signs)
        with open(path, "rb") as file:
            for number in range(first, len(self.offsets)):
                image = self.offsets[number]
                label = image + self.labels[number] * BLOCK
                self.signs.append(
                    _sign(
                        os.pread(file.fileno(), BLOCK, image - BLOCK),
                        os.pread(file.fileno(), 2 * BLOCK, label - BLOCK),
                    )
                )
            size = os.fstat(file.fileno()).st_size
        self.shards.append(Shard(path.name, size, len(self.offsets) - first))

    def span(self, number: int) -> tuple[int, int]:
        """Return the range to read from the tar file for a sample: first byte, number of bytes.

        It contains the image and its .cls with their headers, and everything between them.
        """
        image = self.offsets[number]
        label = image + self.labels[number] * BLOCK
        start = min(image, label) - BLOCK
        return start, max(image + self.sizes[number], label + BLOCK) - start

    def image(self, number: int, data: bytes) -> bytes:
        """Return the image from the bytes of a sample's span."""
        start = BLOCK - min(0, self.labels[number]) * BLOCK
        return data[start : start + self.sizes[number]]

    def sign(self, number: int, data: bytes) -> int:
        """Compute the checksum of a sample from the bytes of its span."""
        image = BLOCK - min(0, self.labels[number]) * BLOCK
        label = BLOCK + max(0, self.labels[number]) * BLOCK
        return _sign(data[image - BLOCK : image], data[label - BLOCK : label + BLOCK])

    def write(self, path: Path) -> None:
        """Write the file under a temporary name, then rename it."""
        body = b"".join(_little(part).tobytes() for part in self._parts())
        head = {
            "classes": self.classes,
            "samples": len(self.offsets),
            "shards": [asdict(shard) for shard in self.shards],
        }
        rest = json.dumps(head).encode() + b"\n" + body
        # A unique name, because another process may write the same index now.
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        try:
            with open(part, "wb") as file:
                file.write(_MAGIC + _digest(rest) + b"\n" + rest)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> "Index":
        """Read the index of a file.

        Raises:
            UsageError: the file is damaged, or in another format.
        """
        magic, _, rest = path.read_bytes().partition(b"\n")
        digest, _, rest = rest.partition(b"\n")
        try:
            if magic + b"\n" != _MAGIC:
                raise ValueError("its first line differs")
            if _digest(rest) != digest:
                raise ValueError("its digest does not fit")
            line, _, body = rest.partition(b"\n")
            head = json.loads(line)
            index = cls(head["classes"], [Shard(**shard) for shard in head["shards"]])
            for part in index._parts():
                length = head["samples"] * part.itemsize
                part.frombytes(body[:length])
                _little(part, inplace=True)
                body = body[length:]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "HT521",
                f"{path} is damaged: {error}",
                "an index of `hpctrain shards`",
                f"rm {path} && hpctrain shards index {path.parent}",
            ) from None
        return index

    def _parts(self) -> tuple["array[int]", ...]:
        return self.offsets, self.sizes, self.targets, self.labels, self.signs


def path_of(folder: Path, split: str) -> Path:
    """Return the path of a split's index."""
    return folder / f"{split}.index"


def shard_paths(folder: Path, split: str) -> list[Path]:
    """Return the tar files of a split, in order."""
    pattern = re.compile(re.escape(split) + r"-\d+\.tar")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _sign(image: bytes, label: bytes) -> int:
    """Return the checksum of a sample's headers and class."""
    return zlib.crc32(label, zlib.crc32(image))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).hexdigest().encode()


def _little(part: "array[int]", inplace: bool = False) -> "array[int]":
    """Convert numbers between the machine's byte order and little-endian."""
    if sys.byteorder == "little":
        return part
    swapped = part if inplace else part[:]
    swapped.byteswap()
    return swapped
