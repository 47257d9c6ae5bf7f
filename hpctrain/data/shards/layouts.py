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

__all__ = ["Source", "image_source", "same_classes"]

_SYSTEM = Path("/usr/share/datasets")
_SPLITS = ("train", "val")


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
        folder = _find(os.fspath(path), env)
        if (folder / split).is_dir():
            return FolderSource(folder / split)
        if shard_paths(folder, split):
            return ShardSource(folder, split)
        raise _missing(folder, split)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UsageError(
            "HT511", f"--data {path}: {where}{error.strerror}", "folders and files that can be read"
        ) from None


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


def _find(path: str, env: Mapping[str, str]) -> Path:
    """Find the folder of a path or name."""
    places = [Path(path).expanduser()]
    if os.sep not in path and path not in (".", ".."):
        own = [Path(env[env_vars.DATA], path)] if env.get(env_vars.DATA) else []
        places = [*own, *places, _SYSTEM / path]
    for place in places:
        if place.is_dir():
            return place
    files = [str(place) for place in places if place.exists()]
    raise UsageError(
        "HT510",
        f"--data {path}: {files[0]} is a file"
        if files
        else f"--data {path}: no folder {', '.join(map(str, places))}",
        _layouts(Path("PATH"), "SPLIT"),
        "--data PATH of a folder that has them",
    )


def _layouts(folder: Path, split: str) -> str:
    """Return the expected layouts, for messages."""
    return f"{folder / split}/CLASS/*.jpg, or {folder / split}-*.tar of `hpctrain shards make`"


def _missing(folder: Path, split: str) -> UsageError:
    """Return the error for a folder without the split; it lists the folder's content."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    near = [folder / name for name in names if _has(folder / name, split)]
    others = [name for name in _SPLITS if name != split and _has(folder, name)]
    fix = "--data PATH of a folder that has it"
    if near:
        fix = f"--data {near[0]}"
    elif others:
        fix = f"put the images of {split} beside those of {others[0]}"
    return UsageError(
        "HT510",
        f"{folder} has no {split}: there is {_listing(names)}",
        _layouts(folder, split),
        fix,
    )


def _has(folder: Path, split: str) -> bool:
    try:
        return (folder / split).is_dir() or bool(shard_paths(folder, split))
    except OSError:
        return False


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
