"""Entry points by which other installed packages add launchers, backends and trackers."""

import contextlib
import functools
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn, TypeVar

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
    # 2 ms for this look at the files that it reads.
    if not any(f"[{group}]" in text for text in _texts(path)):
        return ()
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=group), key=lambda entry: entry.name))


def _texts(path: Iterable[str]) -> Iterator[str]:
    """Yield the files of entry points of all packages on a path."""
    for place in path:
        with contextlib.suppress(OSError):
            for name in os.listdir(place or "."):
                if name.endswith((".dist-info", ".egg-info")):
                    with (
                        contextlib.suppress(OSError),
                        open(
                            os.path.join(place, name, "entry_points.txt"), errors="replace"
                        ) as file,
                    ):
                        yield file.read()


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
            _refuse(entry, f"the name {entry.name} is taken")
        try:
            loaded = entry.load()
        except Exception as error:  # whatever the package does as it is imported
            _refuse(entry, f"its import fails: {type(error).__name__}: {error}")
        if not (isinstance(loaded, type) and issubclass(loaded, kind)):
            _refuse(entry, f"{loaded!r} is no class that derives from hpctrain's {kind.__name__}")
        if "name" in kind.__annotations__ and vars(loaded).get("name") != entry.name:
            _refuse(entry, f"the class needs the line: name = {entry.name!r}")
        classes[entry.name] = loaded
    return classes


def _refuse(entry: "EntryPoint", problem: str) -> NoReturn:
    """Raise the error of an entry point that cannot be used."""
    package = entry.dist.name if entry.dist else "PACKAGE"
    raise UsageError(
        "HT119",
        f"{package} adds {entry.name} = {entry.value} to {entry.group}: {problem}",
        "a class under a name of its own, as docs/architecture.md shows it",
        f"install another version of {package}",
        f"pip uninstall {package}",
    )
