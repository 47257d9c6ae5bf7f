"""Image sources by path, in either of the two layouts on disk."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hpctrain.cluster import env_vars
from hpctrain.data.shards.folders import FolderSource
from hpctrain.data.shards.index import shard_paths
from hpctrain.data.shards.shard_reader import ShardSource
from hpctrain.errors import UsageError

__all__ = ["Source", "image_source", "places", "same_classes", "unreadable"]

_SYSTEM = Path("/usr/share/datasets")


class Source(Protocol):
    """Interface of a source of encoded images and their classes.

    Attributes:
        classes: names of the classes; a target is an index in this list.
        place: path of the images, for messages.
    """

    classes: list[str]
    place: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """Return the bytes of an image's file."""
        ...

    def target(self, index: int) -> int:
        """Return the number of an image's class."""
        ...

    def name(self, index: int) -> str:
        """Return an image's path, for messages."""
        ...


def image_source(
    path: str | os.PathLike[str], split: str, env: Mapping[str, str] = os.environ
) -> FolderSource | ShardSource:
    """Return the images of PATH/SPLIT/CLASS/FILE or, without such a folder, of PATH/SPLIT-*.tar.

    Both layouts have the same samples in the same order, so they give the same numbers.

    Args:
        path: folder, or the name of a folder in $HPCTRAIN_DATA (for a job's own copy), in the
            current folder, or in /usr/share/datasets.
        split: `train`, `val`, or any other name.
        env: environment with $HPCTRAIN_DATA.

    Raises:
        UsageError: there are no images in one of the two layouts.
    """
    try:
        searched = places(os.fspath(path), env)
        folder = next((place for place in searched if place.is_dir()), None)
        if folder is not None and (folder / split).is_dir():
            return FolderSource(folder / split)
        if folder is not None and shard_paths(folder, split):
            return ShardSource(folder, split)
        raise _missing(path, searched, folder, split)
    except OSError as error:
        raise unreadable(path, error) from None


def _missing(
    path: str | os.PathLike[str], searched: Sequence[Path], folder: Path | None, split: str
) -> UsageError:
    """Return the error for a folder that does not exist, or has not the split."""
    found = f"--data {path}: no folder {', '.join(map(str, searched))}"
    fix: Path | str = "PATH of a folder that has it"
    if folder is not None:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        found = f"{folder} has no {split}: there is {', '.join(names[:5]) or 'nothing'}{more}"
        below = (*folder.glob(f"*/{split}"), *folder.glob(f"*/{split}-*.tar"))
        fix = next((place.parent for place in below), fix)
    expected = (folder or Path("PATH")) / split
    return UsageError(
        "HT510",
        found,
        f"{expected}/CLASS/*.jpg, or {expected}-*.tar of `hpctrain shards make`",
        f"--data {fix}",
    )


def unreadable(
    path: str | os.PathLike[str], error: OSError, writes_cache: bool = False
) -> UsageError:
    """Return the error for a data set that cannot be read.

    Args:
        path: path or name of the data set.
        error: error of the file system.
        writes_cache: whether the data set is downloaded to the cache.
    """
    where = f"{error.filename}: " if error.filename else ""
    return UsageError(
        "HT511",
        f"--data {path}: {where}{error.strerror}",
        "folders and files that can be read"
        + (", and a cache that can be written" if writes_cache else ""),
        "--data PATH of a folder that can be read",
    )


def places(name: str, env: Mapping[str, str]) -> list[Path]:
    """Return the folders that a path or a name of a data set may mean, in order.

    Args:
        name: path; or a name in $HPCTRAIN_DATA (for a job's own copy), in the current folder, or in
            /usr/share/datasets.
        env: environment with $HPCTRAIN_DATA.
    """
    path = Path(name).expanduser()
    if os.sep in name or name in (".", ".."):
        return [path]
    own = [Path(env[env_vars.DATA], name)] if env.get(env_vars.DATA) else []
    return [*own, path, _SYSTEM / name]


def same_classes(first: Source, second: Source) -> list[str]:
    """Return the classes that two splits share.

    Raises:
        UsageError: the classes differ, so a target would have another meaning in each split.
    """
    if first.classes == second.classes:
        return first.classes
    found = [
        f"{len(names)} only in {source.place}, such as {names[0]}"
        for source, other in ((first, second), (second, first))
        if (names := sorted(set(source.classes) - set(other.classes)))
    ]
    raise UsageError(
        "HT519",
        f"{first.place} has {len(first.classes)} classes and {second.place} {len(second.classes)}: "
        + ("; ".join(found) or "in another order"),
        "the same classes in both",
        "fetch the missing folders",
        "remove the surplus folders",
    )
