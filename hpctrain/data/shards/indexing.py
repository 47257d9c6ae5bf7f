"""Index of WebDataset's tar files of KEY.jpg and KEY.cls, made from their headers.

Source: "The WebDataset Format" in the documentation of WebDataset. The files of one sample follow
each other, and their paths are equal up to the first dot of the file name; `.cls` contains the
number of the class as text.
"""

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.data.shards.folders import is_image
from hpctrain.data.shards.index import BLOCK, Index, shard_paths
from hpctrain.errors import UsageError

__all__ = ["DAMAGE", "build_index"]

# Errors of tarfile for a damaged header: its own, and those for invalid or too large numbers and
# for names that are not UTF-8.
DAMAGE = (tarfile.TarError, ValueError, OverflowError, EOFError, MemoryError)

# A class is an index in a list of names, so a number with more digits is invalid.
_DIGITS = 7


@dataclass(slots=True)
class _Sample:
    """Image and class file of a sample."""

    key: str
    image: tarfile.TarInfo | None = None
    label: tarfile.TarInfo | None = None
    text: bytes = b""

    def target(self) -> int | None:
        """Return the number of the sample's class; None if there is no valid number."""
        number = self.text.strip()
        return int(number) if number.isdigit() and len(number.lstrip(b"0")) <= _DIGITS else None


def build_index(folder: Path, split: str) -> Index:
    """Make the index of tar files from their headers.

    Classes are named after the outermost folder of their images in the tar files; if that is not
    unique, after the innermost folder; else by their numbers.

    Raises:
        UsageError: a tar file is missing, damaged, or compressed, or has no images with classes.
    """
    index = Index()
    outer: dict[int, str] = {}
    inner: dict[int, str] = {}
    paths = shard_paths(folder, split)
    _refuse_gaps(paths)
    for path in paths:
        first = len(index.offsets)
        try:
            for sample in _samples(path):
                image, label, target = _complete(path, sample)
                index.add(image.offset_data, image.size, target, label.offset_data)
                place = os.path.dirname(sample.key.removeprefix("./"))
                _record_name(outer, target, place.partition("/")[0])
                _record_name(inner, target, place.rpartition("/")[2])
        except DAMAGE as error:
            raise _damaged(path, str(error) or type(error).__name__) from None
        if len(index.offsets) == first:
            raise UsageError("HT520", f"{path} has no images", "tar files of KEY.jpg and KEY.cls")
        index.end_shard(path)
    index.classes = _names(max(outer) + 1, outer, inner)
    return index


def _refuse_gaps(paths: list[Path]) -> None:
    """Raise an error for a missing number; without an index, only the numbers can show a gap."""
    numbers = [int(path.stem.rpartition("-")[2]) for path in paths]
    missing = sorted({*range(len(paths))} - {*numbers})
    if missing:
        example = re.sub(
            r"\d+(?=\.tar$)", lambda old: f"{missing[0]:0{len(old[0])}d}", str(paths[0])
        )
        raise UsageError(
            "HT513",
            f"{example} is missing: there are {len(paths)} tar files, with numbers up to "
            f"{max(numbers)}",
            "numbers from 0 on without a gap, or an index that lists the tar files",
            "copy it again",
            "rename the other files, if this file never existed",
        )


def _record_name(names: dict[int, str], target: int, name: str) -> None:
    """Record the name of a class; it becomes empty if its images have different names."""
    if names.setdefault(target, name) != name:
        names[target] = ""


def _names(count: int, *proposals: dict[int, str]) -> list[str]:
    """Return the first proposal with a unique name for each class, else numbers."""
    for proposal in proposals:
        names = [proposal.get(number, str(number)) for number in range(count)]
        if all(names) and len(set(names)) == count:
            return names
    return list(map(str, range(count)))


def _samples(path: Path) -> Iterator[_Sample]:
    """Yield the samples of a tar file."""
    sample = None
    for member, text in _members(path):
        folder, name = os.path.split(member.name)
        stem, _, suffix = name.partition(".")
        key = os.path.join(folder, stem)
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if is_image(f"_.{suffix}"):
            _refuse_two(path, sample.image, member)
            sample.image = member
        elif suffix == "cls":
            _refuse_two(path, sample.label, member)
            sample.label, sample.text = member, text
    if sample is not None:
        yield sample


def _refuse_two(path: Path, first: tarfile.TarInfo | None, second: tarfile.TarInfo) -> None:
    if first is not None:
        raise UsageError(
            "HT520",
            f"{path}: {first.name} and {second.name} belong to the same sample",
            "one image and one class in a sample; its files have the same name up to the first dot",
            "make tar files without the other files",
            "give each sample a different name",
        )


def _complete(path: Path, sample: _Sample) -> tuple[tarfile.TarInfo, tarfile.TarInfo, int]:
    """Return image, .cls and class of a sample, or raise an error if one is missing."""
    target = sample.target()
    if sample.image is None or sample.label is None or target is None:
        missing = "no image" if sample.image is None else "no number of a class in a .cls"
        raise UsageError(
            "HT520",
            f"{path}: {sample.key} has {missing}",
            "KEY.jpg and KEY.cls, with the number of the class, for each sample",
            "hpctrain shards make FOLDER TARGET (makes such tar files of a folder)",
        )
    return sample.image, sample.label, target


def _members(path: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the files in a tar file, with the first bytes of each .cls."""
    end = 0
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            if member.issparse():
                raise _damaged(path, f"{member.name} has holes that are left out (tar -S)")
            _refuse_links(path, member)
            end = member.offset_data + -(-member.size // BLOCK) * BLOCK
            if member.isfile():
                small = tar.extractfile(member) if member.name.endswith(".cls") else None
                yield member, small.read(BLOCK) if small is not None else b""
    _refuse_other_end(path, end)


def _refuse_links(path: Path, member: tarfile.TarInfo) -> None:
    """Refuse links and devices; tar stores a repeated file as a link, so a sample would be lost."""
    if member.issym() or member.islnk() or member.isdev():
        kind = "device or pipe" if member.isdev() else f"link to {member.linkname}"
        raise UsageError(
            "HT520",
            f"{path}: {member.name} is a {kind}",
            "files alone, each with all of its bytes",
            "tar --dereference --hard-dereference -cf … (makes such tar files)",
        )


def _refuse_other_end(path: Path, end: int) -> None:
    """Refuse an incomplete tar file, and data after its end that tar does not read.

    A tar file ends with two blocks of zeros, and zeros up to a full record of 20 blocks.
    """
    most = (20 + 1) * BLOCK
    with open(path, "rb") as file:
        rest = os.pread(file.fileno(), most + 1, end)
    if rest[:BLOCK] != bytes(BLOCK):
        raise _damaged(path, f"it ends, or is no longer a tar file, at byte {end:,}")
    if len(rest) > most or rest.strip(b"\0"):
        raise _damaged(
            path, f"its files end at byte {end:,} of {path.stat().st_size:,}: an incomplete "
            "copy, or several tar files in one"
        )  # fmt: skip


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        "HT513",
        f"{path} is damaged: {why}",
        "one complete tar file, not compressed, in records of 10,240 bytes as tar makes them",
        "copy it again",
        "make it again with hpctrain shards make",
    )
