"""Reader of images in tar files: SPLIT-000000.tar, … with KEY.jpg and KEY.cls, and an index."""

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
    """Images of FOLDER/SPLIT-*.tar, each read from its offset in its file.

    Without an index file, the index is made in memory from the headers of the tar files, and rank 0
    logs the command that writes it. Tar files are opened when needed. Each process keeps at most
    128 of them open, and the limit on open files is raised for that if the system allows it.

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
        self._files = Descriptors()
        make_room(len(self._index.shards))

    def __len__(self) -> int:
        return len(self._index.offsets)

    def target(self, index: int) -> int:
        """Return the number of an image's class."""
        return self._index.targets[index]

    def name(self, index: int) -> str:
        """Return the tar file of an image, and the image's name in that file."""
        number = self._shard(index)
        path = self._paths[number]
        first, offset = self._firsts[number], self._index.offsets[index]
        # A long name is stored before the header, so search from the end of the previous sample.
        before, size = self._index.span(index - 1) if index > first else (0, 0)
        name = f"sample {index - first}"
        try:
            with open(path, "rb") as file:
                file.seek(-(-(before + size) // BLOCK) * BLOCK)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    name = next(
                        (member.name for member in tar if member.offset_data == offset), name
                    )
        except (OSError, *DAMAGE):
            pass  # the name is only for a message
        return f"{path}: {name}"

    def read(self, index: int) -> bytes:
        """Return the bytes of an image.

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
                f"it is a different tar file: its sample {index - self._firsts[number]} "
                "differs, or has a different class",
            )
        return self._index.image(index, data)

    def _shard(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bisect.bisect_right(self._firsts, index) - 1

    def _compare(self, paths: list[Path]) -> None:
        """Compare the existing tar files with those of the index."""
        names, shards = {path.name for path in paths}, self._index.shards
        indexed = {shard.name for shard in shards}
        for number, shard in enumerate(shards):
            if shard.name not in names:
                raise self._misfit(number, "the file does not exist")
            size = (self._folder / shard.name).stat().st_size
            if size != shard.bytes:
                raise self._misfit(number, f"it has {size:,} bytes and not {shard.bytes:,}")
        if names - indexed:
            raise UsageError(
                "HT521",
                f"{self._path} does not list {min(names - indexed)}",
                "an index of all tar files",
                self._rebuild_command(),
            )

    def _misfit(self, number: int, why: str) -> UsageError:
        path = self._folder / self._index.shards[number].name
        return UsageError(
            "HT521",
            f"{self._path} does not fit {path}: {why}",
            "the tar files that the index was made of",
            "copy the tar files again",
            self._rebuild_command(),
        )

    def _rebuild_command(self) -> str:
        return f"rm {self._path} && hpctrain shards index {self._folder}"
