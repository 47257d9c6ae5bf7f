"""Entry points by which other installed packages add launchers, backends and trackers."""

import functools
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["BACKENDS", "LAUNCHERS", "TRACKERS", "found", "load"]

LAUNCHERS = "hpctrain.launchers"
BACKENDS = "hpctrain.backends"
TRACKERS = "hpctrain.trackers"

T = TypeVar("T")


def found(group: str) -> tuple["EntryPoint", ...]:
    """Return the entry points of a group, by name; none is imported."""
    return _found(group, tuple(sys.path))


@functools.cache
def _found(group: str, path: tuple[str, ...]) -> tuple["EntryPoint", ...]:
    # Importing importlib.metadata takes longer than the rest of a detection: some 45 ms, against
    # 2 ms for a look at the files that it reads.
    if group not in _groups(path):
        return ()
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=group), key=lambda entry: entry.name))


@functools.cache
def _groups(path: tuple[str, ...]) -> Collection[str]:
    """Return the groups of hpctrain that packages on a path have."""
    found: set[str] = set()
    for place in path:
        names: list[str] = []
        with suppress(OSError):  # no folder
            names = os.listdir(place or ".")
        for name in names:
            if not name.endswith((".dist-info", ".egg-info")):
                continue
            with suppress(OSError):
                text = Path(place, name, "entry_points.txt").read_text(errors="replace")
                found.update(one for one in (BACKENDS, LAUNCHERS, TRACKERS) if f"[{one}]" in text)
    return found


def load(
    group: str, kind: type[T], taken: Collection[str], wanted: Collection[str] | None = None
) -> Mapping[str, type[T]]:
    """Import the classes of a group, by name.

    Args:
        group: `BACKENDS`, `LAUNCHERS` or `TRACKERS`.
        kind: class that they derive from. If it has a `name`, theirs is that of the entry point.
        taken: names of hpctrain's own ones.
        wanted: names of those to import; None for all.

    Raises:
        UsageError: a name is taken, a package cannot be imported, or it has no such class.
    """
    classes: dict[str, type[T]] = {}
    for entry in found(group):
        if wanted is not None and entry.name not in wanted:
            continue
        if entry.name in taken or entry.name in classes:
            raise UsageError("HT119.name-taken", entry=entry)
        try:
            loaded = entry.load()
        except Exception as error:  # whatever the package does as it is imported
            raise UsageError("HT119.import-fails", entry=entry, error=error) from error
        if not (isinstance(loaded, type) and issubclass(loaded, kind)):
            raise UsageError("HT119.not-a-subclass", entry=entry, loaded=loaded, base=kind)
        if "name" in kind.__annotations__ and vars(loaded).get("name") != entry.name:
            raise UsageError("HT119.class-name-differs", entry=entry)
        classes[entry.name] = loaded
    return classes
