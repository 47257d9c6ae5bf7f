"""Images in a folder for each class: SPLIT/CLASS/FILE, as torchvision's ImageFolder has them."""

import bisect
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.errors import DataError, UsageError

__all__ = ["FolderSource", "is_image"]

_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
)


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image; hidden files, as macOS leaves, are none."""
    return os.path.splitext(name)[1].lower() in _SUFFIXES and not name.startswith(".")


class FolderSource:
    """The images of SPLIT/CLASS/FILE: classes by name, and in each its files by name.

    Folders in that of a class belong to the class, after its files; links are followed. Names are
    kept in one piece of memory, which processes share after a fork.

    Args:
        folder: that of the split.

    Attributes:
        classes: the names of the class folders, in order; a target is a place in them.
        place: the folder.

    Raises:
        UsageError: it is not such a folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.place = os.fspath(folder)
        try:
            self._list()
        except OSError as error:
            raise UsageError(
                f"{error.filename or self.place}: {error.strerror}",
                "folders and files that can be read",
            ) from None

    def _list(self) -> None:
        """All that there is."""
        self.classes = _classes(Path(self.place))
        starts, ends, names = [0], array("Q"), bytearray()
        for name in self.classes:
            for file in _files(self.place, name):
                names += os.fsencode(file)
                ends.append(len(names))
            if len(ends) == starts[-1]:
                raise UsageError(
                    f"{os.path.join(self.place, name)} has no images",
                    "images in the folder of each class",
                    f"rmdir {os.path.join(self.place, name)}, or fetch its images again",
                )
            starts.append(len(ends))
        self._starts, self._ends, self._names = starts, ends, bytes(names)

    def __len__(self) -> int:
        return len(self._ends)

    def member(self, index: int) -> str:
        """An image's path in the folder, which begins with its class."""
        self._check(index)
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index]])

    def name(self, index: int) -> str:
        """An image's path."""
        return os.path.join(self.place, self.member(index))

    def target(self, index: int) -> int:
        """The number of an image's class."""
        self._check(index)
        return bisect.bisect_right(self._starts, index) - 1

    def read(self, index: int) -> bytes:
        """An image's file.

        Raises:
            DataError: it cannot be read.
        """
        try:
            with open(self.name(index), "rb", buffering=0) as file:
                return file.readall()
        except OSError as error:
            raise DataError(
                f"{self.name(index)} cannot be read: {error.strerror}",
                "the files that were there when the run began",
            ) from None

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(index)


def _classes(folder: Path) -> list[str]:
    """The folders in that of a split."""
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".")]
    classes = sorted(entry.name for entry in shown if entry.is_dir())
    _refuse_lost(shown)
    if not classes:
        flat = sum(is_image(entry.name) for entry in shown)
        raise UsageError(
            f"{folder} has {flat or 'no'} images and no folders"
            + (", as ILSVRC ships its validation set" if flat == 50_000 else ""),
            f"a folder for each class, {folder}/CLASS/*.jpg",
            "move each image into the folder of its class"
            if flat
            else "choose another folder with --data PATH",
        )
    return classes


def _refuse_lost(entries: Sequence["os.DirEntry[str]"]) -> None:
    """A link to nothing may have been a folder of images."""
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise UsageError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, where nothing is",
                "links to folders or files that are there",
                f"fetch what is missing, or: rm {entry.path}",
            )


def _files(folder: str, below: str) -> Iterator[str]:
    """The images in a folder and then in those in it, as paths from the split's folder on."""
    with os.scandir(os.path.join(folder, below)) as entries:
        rising = sorted(entries, key=lambda entry: entry.name)
    deeper = []
    _refuse_lost([entry for entry in rising if not is_image(entry.name)])
    for entry in rising:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            deeper.append(entry.name)
        elif is_image(entry.name):
            # A link to nothing stays, not to be lost without a word: reading it is an error.
            if not entry.is_file() and os.path.exists(entry.path):
                raise UsageError(
                    f"{entry.path} is no file",
                    "files, and nothing that a reader would wait at, such as a pipe",
                    f"rm {entry.path}",
                )
            yield f"{below}/{entry.name}"
    for name in deeper:
        yield from _files(folder, f"{below}/{name}")
