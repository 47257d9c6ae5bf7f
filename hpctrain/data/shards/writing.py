"""Writer from folders of images to tar files; a failed call leaves no files."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.data.shards.folders import FolderSource
from hpctrain.data.shards.index import Index, path_of
from hpctrain.errors import HpctrainError, UsageError

__all__ = ["make"]

Progress = Callable[[str, int, int, int], None]


def make(
    source: Path,
    target: Path,
    splits: Sequence[str],
    shard_size: int,
    progress: Progress = lambda split, done, samples, written: None,
) -> None:
    """Write SOURCE/SPLIT/CLASS/FILE as TARGET/SPLIT-000000.tar, … and TARGET/SPLIT.index.

    The samples keep their order and their bytes. Everything is written to a temporary folder, which
    is renamed when it is complete.

    Args:
        source: folder of the splits.
        target: new or empty folder.
        splits: names of the splits, such as `train` and `val`.
        shard_size: size at which a tar file is full, in bytes.
        progress: function called after each image, with the split, its images so far, all its
            images, and its bytes written so far.

    Raises:
        UsageError: the source has another layout, the target exists, or another process writes it.
        DataError: an image cannot be read.
        HpctrainError: the disk is full, or cannot be written.
    """
    target = target.resolve()  # resolves links, and `.`
    try:
        _refuse_target(target)
        _refuse_splits(source, splits)
    except OSError as error:
        raise UsageError(
            "HT511",
            f"{error.filename}: {error.strerror}",
            "folders that can be read, and one to write",
        ) from None
    sources = {split: FolderSource(source / split) for split in splits}
    part = target.with_name(f".{target.name}.part")
    _make_part(part, target)
    try:
        for split, images in sources.items():
            _write(images, part, split, shard_size, progress)
        part.rename(target)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _refuse_target(target: Path) -> None:
    """Refuse an existing target, and a mount point, to which a folder cannot be renamed."""
    if target.is_mount():
        raise UsageError(
            "HT522",
            f"{target} is where a file system is mounted",
            "a new folder",
            f"{target / 'shards'}",
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            "HT522", f"{target} exists", "a new folder", "choose another", "remove this one"
        )


def _refuse_splits(source: Path, splits: Sequence[str]) -> None:
    """Refuse an empty list of splits, and splits that are not folders of the source."""
    if not splits:
        raise UsageError("HT510", "no splits", "names of folders in SOURCE", "--splits train,val")
    existing = [split for split in splits if os.sep not in split and (source / split).is_dir()]
    for split in splits:
        if split not in existing or split in (".", ".."):
            raise UsageError(
                "HT510",
                f"{source} has no folder {split}",
                f"{source / split}/CLASS/*.jpg" if os.sep not in split else "--splits NAME,NAME",
                f"--splits {','.join(existing)}" if existing else "other --splits",
                "" if existing else "another SOURCE",
            )


def _make_part(part: Path, target: Path) -> None:
    """Make the temporary folder."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
    except FileExistsError:
        raise UsageError(
            "HT522",
            f"{part} exists: another process is writing, or was killed",
            "one writer at a time",
            f"rm -r {part} (if no other process is writing)",
        ) from None
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> HpctrainError:
    return HpctrainError(
        "HT522",
        f"{target} cannot be written: {error.strerror}",
        f"room for all images, and a folder {target.parent} in which you may write",
        "choose another TARGET; no files of this one remain",
    )


def _write(
    images: FolderSource, folder: Path, split: str, shard_size: int, progress: Progress
) -> None:
    """Write one split."""
    index = Index(classes=images.classes)
    written, keys = 0, _Keys(images)
    while len(index.offsets) < len(images):
        path = folder / f"{split}-{len(index.shards):06d}.tar"
        with open(path, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                while len(index.offsets) < len(images) and tar.offset < shard_size:
                    _add(tar, images, index, keys)
                    written += index.sizes[-1]
                    progress(split, len(index.offsets), len(images), written)
            file.flush()
            os.fsync(file.fileno())
        index.end_shard(path)
    index.write(path_of(folder, split))


class _Keys:
    """Unique names of samples: the name of the image, without suffix and dots."""

    def __init__(self, images: FolderSource) -> None:
        self._images = images
        self._target, self._used = -1, set[str]()  # names begin with the class, so one class only

    def next(self, number: int) -> str:
        """Return the name of the next sample, without a suffix."""
        target = self._images.target(number)
        if target != self._target:
            self._target, self._used = target, set()
        folder, name = os.path.split(os.path.splitext(self._images.member(number))[0])
        key = os.path.join(folder, name.replace(".", "_"))
        if "." in name or key in self._used:  # a.b.jpg, which may lose its dot; a.jpg and a.png
            key += f"-{number}"
        while key in self._used:  # a.b.jpg, which became a_b-0, and a_b-0.jpg
            key += "-"
        self._used.add(key)
        return key


def _add(tar: tarfile.TarFile, images: FolderSource, index: Index, keys: _Keys) -> None:
    """Add the next sample: its image and its class."""
    number = len(index.offsets)
    data, target = images.read(number), images.target(number)
    key, suffix = keys.next(number), os.path.splitext(images.member(number))[1]
    offset = _put(tar, f"{key}{suffix}", data)
    index.add(offset, len(data), target, _put(tar, f"{key}.cls", str(target).encode()))


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a file, and return the offset of its bytes. The same files give the same tar file."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
    return int(tar.offset) - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
