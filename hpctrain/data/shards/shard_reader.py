"""Reader of images in tar files: SPLIT-000000.tar, … with KEY.jpg and KEY.cls, and an index."""

import bisect
import errno
import functools
import io
import itertools
import os
import tarfile
import zlib
from pathlib import Path

from hpctrain.data.shards.index import DAMAGE, Index, build_index, path_of, shard_paths
from hpctrain.errors import DataError, UsageError
from hpctrain.process.logging import logger

__all__ = ["ShardSource"]

# ImageNet has more tar files than the 1,024 files that a process may usually have open, and each
# loader process of each rank of a host reads from all of them.
_MOST_OPEN = 128


class ShardSource:
    """Images of FOLDER/SPLIT-*.tar, each read from its offset in its file.

    Without an index file, the index is made in memory from the headers of the tar files, and rank 0
    logs the command that writes it. Tar files are opened when needed. Each process keeps the 128
    that were read last open.

    Args:
        folder: folder of the tar files.
        split: `train`, `val`, …

    Attributes:
        classes: names of the classes; a target is an index in this list.
        place: FOLDER/SPLIT.

    Raises:
        UsageError: tar files are missing, damaged, or different from those of the index.
    """

    def __init__(self, folder: str | os.PathLike[str], split: str) -> None:
        self.place = os.path.join(folder, split)
        self._folder = Path(folder)
        self._path = path_of(self._folder, split)
        if self._path.exists():
            self._index = Index.read(self._path)
            self._compare(shard_paths(self._folder, split))
        else:
            logger.info(
                "no %s, so all tar files are searched; to write it: hpctrain shards index %s",
                self._path,
                folder,
            )
            self._index = build_index(self._folder, split)
        self.classes = self._index.classes
        counts = (shard.samples for shard in self._index.shards)
        self._firsts = list(itertools.accumulate(counts, initial=0))
        self._paths = [self._folder / shard.name for shard in self._index.shards]

    def __len__(self) -> int:
        return len(self._index)

    def target(self, index: int) -> int:
        """Return the number of an image's class."""
        return self._index.row(index).target

    def name(self, index: int) -> str:
        """Return the tar file of an image, and the image's name in that file."""
        path, row = self._paths[self._shard(index)], self._index.row(index)
        offset = row.start + row.at
        try:
            with tarfile.open(path, "r:") as tar:
                name = next(member.name for member in tar if member.offset_data == offset)
        except (OSError, StopIteration, *DAMAGE):  # the name is only for a message
            name = f"the image at byte {offset}"
        return f"{path}: {name}"

    def read(self, index: int) -> bytes:
        """Return the bytes of an image.

        Raises:
            DataError: the tar file cannot be read.
            UsageError: the headers of the image and its .cls, or the .cls, are not those of the
                index.
        """
        shard, row = self._shard(index), self._index.row(index)
        data, end = _read(self._paths[shard], row.length, row.start), row.at + row.size
        if len(data) != row.length or zlib.crc32(data[: row.at] + data[end:]) != row.sign:
            raise self._misfit(
                self._paths[shard],
                f"it is a different tar file: its sample {index - self._firsts[shard]} differs, or "
                "has a different class",
            )
        return data[row.at : end]

    def _shard(self, index: int) -> int:
        return bisect.bisect_right(self._firsts, index) - 1

    def _compare(self, paths: list[Path]) -> None:
        """Compare the existing tar files with those of the index."""
        there = {path.name: path.stat().st_size for path in paths}
        indexed = {shard.name: shard.bytes for shard in self._index.shards}
        for name in sorted(there.keys() | indexed.keys()):
            size, expected = (sizes.get(name, "no file") for sizes in (there, indexed))
            if size != expected:
                raise self._misfit(
                    self._folder / name, f"bytes in the index: {expected}, in the folder: {size}"
                )

    def _misfit(self, path: Path, why: str) -> UsageError:
        return UsageError(
            "HT521",
            f"{self._path} does not fit {path}: {why}",
            "the tar files that the index was made of",
            "copy the tar files again",
            f"rm {self._path} && hpctrain shards index {self._folder}",
        )


class _File(io.FileIO):
    """File that is closed when no reference is left."""

    def __del__(self) -> None:
        self.close()


_opened = functools.lru_cache(_MOST_OPEN)(_File)


def _read(path: Path, size: int, start: int) -> bytes:
    """Return a part of a file; fewer bytes if the file ends before.

    Threads, and processes after a fork, may read at the same time, because reads use no file
    position.
    """
    try:
        # The local reference keeps the file open if another thread drops it from the cache.
        file = _opened(path)
        return os.pread(file.fileno(), size, start)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise DataError(
                "HT512",
                f"{path} cannot be read: {error.strerror}",
                f"a limit that allows {_MOST_OPEN} tar files in addition to the other open files",
                "ulimit -n 4096 (before the ranks start)",
            ) from None
        raise DataError(
            "HT511",
            f"{path} cannot be read: {error.strerror}",
            "the tar files that were there when the run began",
        ) from None
