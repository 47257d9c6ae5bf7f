"""Writer from folders of images to tar files; a failed call leaves no files."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.data.shards.folders import FolderSource
from hpctrain.data.shards.index import build_index, path_of
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
        _refuse(source, target, splits)
        sources = {split: FolderSource(source / split) for split in splits}
    except OSError as error:
        raise UsageError(
            "HT511",
            f"{error.filename}: {error.strerror}",
            "folders that can be read, and one to write",
        ) from None
    part = target.with_name(f".{target.name}.part")
    try:
        part.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            "HT522",
            f"{part} exists: another process is writing, or was killed",
            "one writer at a time",
            f"rm -r {part} (if no other process is writing)",
        ) from None
    except OSError as error:
        raise _unwritable(target, error) from None
    try:
        for split, images in sources.items():
            _write(images, part, split, shard_size, progress)
        part.rename(target)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _refuse(source: Path, target: Path, splits: Sequence[str]) -> None:
    """Refuse a target to which a folder cannot be renamed, and splits that the source has not."""
    if target.is_mount() or (
        target.exists() and not (target.is_dir() and not any(target.iterdir()))
    ):
        raise UsageError(
            "HT522",
            f"{target} exists",
            "a new folder, or an empty one where no file system is mounted",
            f"{target / 'shards'}",
        )
    known = sorted(entry.name for entry in source.iterdir() if entry.is_dir())
    for split in splits or [""]:
        if split not in known:
            raise UsageError(
                "HT510",
                f"{source} has no folder {split}" if split else "no splits",
                f"{source / (split or 'SPLIT')}/CLASS/*.jpg",
                f"--splits {','.join([one for one in splits if one in known] or known)}",
            )


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
    number = written = shard = 0
    keys = set[str]()
    while number < len(images):
        with open(folder / f"{split}-{shard:06d}.tar", "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                while number < len(images) and tar.offset < shard_size:
                    data, target = images.read(number), images.target(number)
                    if number and target != images.target(number - 1):
                        keys.clear()  # names begin with the class
                    stem, suffix = os.path.splitext(images.member(number))
                    key = _key(stem, number, keys)
                    _put(tar, key + suffix, data)
                    _put(tar, f"{key}.cls", str(target).encode())
                    number, written = number + 1, written + len(data)
                    progress(split, number, len(images), written)
            file.flush()
            os.fsync(file.fileno())
        shard += 1
    build_index(folder, split).write(path_of(folder, split))


def _key(stem: str, number: int, keys: set[str]) -> str:
    """Return a new name for a sample, without dots in the file name, where a key would end."""
    folder, name = os.path.split(stem)
    key = os.path.join(folder, name.replace(".", "_"))
    while key in keys:
        key += f"-{number}"
    keys.add(key)
    return key


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file. The same files give the same tar file."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
