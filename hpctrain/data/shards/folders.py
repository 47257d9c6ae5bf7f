"""Images in one folder per class: SPLIT/CLASS/FILE, as in torchvision's ImageFolder."""

import bisect
import os
from array import array
from collections.abc import Iterator
from typing import NoReturn

from hpctrain.errors import DataError, UsageError

__all__ = ["FolderSource", "is_image"]

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


def is_image(name: str) -> bool:
    """Return whether a file name is an image; hidden files, as macOS makes, are not images."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


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
        OSError: a folder cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.place = os.fspath(folder)
        _, self.classes, flat = next(_walk(self.place))
        if not self.classes:
            raise UsageError(
                "HT518",
                f"{self.place} has {len(flat) or 'no'} images and no folders",
                f"a folder for each class, {self.place}/CLASS/*.jpg",
                "move each image into the folder of its class"
                if flat
                else "choose another folder with --data PATH",
            )
        starts, ends, names = [0], array("Q"), bytearray()
        for name in self.classes:
            for place, _, files in _walk(os.path.join(self.place, name)):
                below = os.path.relpath(place, self.place)
                for file in files:
                    names += os.fsencode(f"{below}/{file}")
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


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield a folder and the folders in it, each with its subfolders and images, in order of name.

    A broken link to an image stays in the list, so that reading it raises an error.

    Raises:
        UsageError: there is another broken link, which may have been a folder of images.
    """
    for place, below, files in os.walk(folder, onerror=_refuse, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(files):
            path = os.path.join(place, name)
            if not (is_image(name) or name.startswith(".") or os.path.exists(path)):
                raise UsageError(
                    "HT518",
                    f"{path} is a link to {os.readlink(path)}, which does not exist",
                    "links to existing folders or files",
                    "fetch the missing files",
                    f"rm {path}",
                )
        yield place, below, sorted(filter(is_image, files))


def _refuse(error: OSError) -> NoReturn:
    raise error
