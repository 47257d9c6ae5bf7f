"""Images in tar files: SPLIT-000000.tar and so on, of KEY.jpg and KEY.cls, read by their index."""

import bisect
import itertools
import os
import tarfile
from pathlib import Path

from hpctrain.data.shards.descriptors import Descriptors, make_room
from hpctrain.data.shards.index import BLOCK, Index, path_of, shard_paths
from hpctrain.data.shards.indexing import DAMAGE, build_index
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["ShardSource"]


class ShardSource:
    """The images of FOLDER/SPLIT-*.tar, each read from its place in its file.

    Where there is no index it is made in memory, from the headers of the tar files, and rank 0 says
    how to write it. Tar files are opened when needed; each process has 128 of them open at most,
    and the limit on open files is raised for that where the system allows it.

    Args:
        folder: that of the tar files.
        split: `train`, `val`, …

    Attributes:
        classes: the names of the classes; a target is a place in them.
        place: FOLDER/SPLIT.

    Raises:
        UsageError: tar files are missing, damaged, or others than those of the index.
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
        self._files = Descriptors()
        make_room(len(self._index.shards))

    def __len__(self) -> int:
        return len(self._index.offsets)

    def target(self, index: int) -> int:
        """The number of an image's class."""
        return self._index.targets[index]

    def name(self, index: int) -> str:
        """The tar file of an image, and its name in there."""
        number = self._shard(index)
        path = self._paths[number]
        first, offset = self._firsts[number], self._index.offsets[index]
        # A long name lies before the header, so what follows the last sample is searched.
        before, size = self._index.span(index - 1) if index > first else (0, 0)
        member = f"sample {index - first}"
        try:
            with open(path, "rb") as file:
                file.seek(-(-(before + size) // BLOCK) * BLOCK)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    member = next((one.name for one in tar if one.offset_data == offset), member)
        except (OSError, *DAMAGE):
            pass  # it is for a message alone
        return f"{path}: {member}"

    def read(self, index: int) -> bytes:
        """An image's bytes.

        Raises:
            DataError: the tar file cannot be read.
            UsageError: the headers of the image and its .cls, or the .cls, are not those of the
                index.
        """
        number = self._shard(index)
        start, size = self._index.span(index)
        data = self._files.read(self._paths[number], size, start)
        if len(data) != size or self._index.sign(index, data) != self._index.signs[index]:
            raise self._misfit(
                number,
                f"it is another tar file, as sample {index - self._firsts[number]} in it is "
                "another, or has another class",
            )
        return self._index.image(index, data)

    def _shard(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bisect.bisect_right(self._firsts, index) - 1

    def _compare(self, there: list[Path]) -> None:
        """Hold the tar files that are there to those of the index."""
        names, shards = {path.name for path in there}, self._index.shards
        known = {shard.name for shard in shards}
        for number, shard in enumerate(shards):
            if shard.name not in names:
                raise self._misfit(number, "it is not there")
            size = (self._folder / shard.name).stat().st_size
            if size != shard.bytes:
                raise self._misfit(number, f"it has {size:,} bytes and not {shard.bytes:,}")
        if names - known:
            raise UsageError(
                f"{self._path} does not know {min(names - known)}",
                "an index of all tar files",
                self._renew(),
            )

    def _misfit(self, number: int, why: str) -> UsageError:
        path = self._folder / self._index.shards[number].name
        return UsageError(
            f"{self._path} does not fit {path}: {why}",
            "the tar files that the index was made of",
            f"copy the tar files again, or: {self._renew()}",
        )

    def _renew(self) -> str:
        return f"rm {self._path}    and then: hpctrain shards index {self._folder}"
