"""Images in one folder per class: SPLIT/CLASS/FILE, as in torchvision's ImageFolder."""

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
    """Return whether a file name is an image; hidden files, as macOS makes, are not images."""
    return os.path.splitext(name)[1].lower() in _SUFFIXES and not name.startswith(".")


class FolderSource:
    """Images of SPLIT/CLASS/FILE, ordered by class name and then by file name.

    Folders inside of a class folder belong to the class, after its files. Links are followed. Names
    are stored in one block of memory, which processes share after a fork.

    Args:
        folder: folder of the split.

    Attributes:
        classes: names of the class folders, in order; a target is an index in this list.
        place: path of the folder.

    Raises:
        UsageError: the folder does not have this layout.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.place = os.fspath(folder)
        try:
            self._list()
        except OSError as error:
            raise UsageError(
                "HT511",
                f"{error.filename or self.place}: {error.strerror}",
                "folders and files that can be read",
            ) from None

    def _list(self) -> None:
        """List the classes and their images."""
        self.classes = _classes(Path(self.place))
        starts, ends, names = [0], array("Q"), bytearray()
        for name in self.classes:
            for file in _files(self.place, name):
                names += os.fsencode(file)
                ends.append(len(names))
            if len(ends) == starts[-1]:
                raise UsageError(
                    "HT518",
                    f"{os.path.join(self.place, name)} has no images",
                    "images in the folder of each class",
                    f"rmdir {os.path.join(self.place, name)}",
                    "fetch its images again",
                )
            starts.append(len(ends))
        self._starts, self._ends, self._names = starts, ends, bytes(names)

    def __len__(self) -> int:
        return len(self._ends)

    def member(self, index: int) -> str:
        """Return an image's path in the folder, which begins with its class."""
        self._check(index)
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index]])

    def name(self, index: int) -> str:
        """Return an image's path."""
        return os.path.join(self.place, self.member(index))

    def target(self, index: int) -> int:
        """Return the number of an image's class."""
        self._check(index)
        return bisect.bisect_right(self._starts, index) - 1

    def read(self, index: int) -> bytes:
        """Return the bytes of an image's file.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with open(self.name(index), "rb", buffering=0) as file:
                return file.readall()
        except OSError as error:
            raise DataError(
                "HT511",
                f"{self.name(index)} cannot be read: {error.strerror}",
                "the files that were there when the run began",
            ) from None

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(index)


def _classes(folder: Path) -> list[str]:
    """Return the names of the class folders of a split."""
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".")]
    classes = sorted(entry.name for entry in shown if entry.is_dir())
    _refuse_broken_links(shown)
    if not classes:
        flat = sum(is_image(entry.name) for entry in shown)
        raise UsageError(
            "HT518",
            f"{folder} has {flat or 'no'} images and no folders"
            + (", as ILSVRC ships its validation set" if flat == 50_000 else ""),
            f"a folder for each class, {folder}/CLASS/*.jpg",
            "move each image into the folder of its class"
            if flat
            else "choose another folder with --data PATH",
        )
    return classes


def _refuse_broken_links(entries: Sequence["os.DirEntry[str]"]) -> None:
    """Raise an error for a broken link, which may have been a folder of images."""
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise UsageError(
                "HT518",
                f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist",
                "links to existing folders or files",
                "fetch the missing files",
                f"rm {entry.path}",
            )


def _files(folder: str, below: str) -> Iterator[str]:
    """Yield the images in a folder, then in its subfolders, as paths in the split's folder."""
    with os.scandir(os.path.join(folder, below)) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    subfolders = []
    _refuse_broken_links([entry for entry in ordered if not is_image(entry.name)])
    for entry in ordered:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            subfolders.append(entry.name)
        elif is_image(entry.name):
            # A broken link stays in the list, so that reading it raises an error.
            if not entry.is_file() and os.path.exists(entry.path):
                raise UsageError(
                    "HT518",
                    f"{entry.path} is no file",
                    "regular files; a reader could wait without end at a pipe",
                    f"rm {entry.path}",
                )
            yield f"{below}/{entry.name}"
    for name in subfolders:
        yield from _files(folder, f"{below}/{name}")
