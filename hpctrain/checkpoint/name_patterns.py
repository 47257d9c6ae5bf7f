"""Patterns of parameter names: as few as possible that fit some names, and no others."""

import glob
from collections.abc import Collection

__all__ = ["covering"]


def covering(chosen: Collection[str], names: Collection[str]) -> list[str]:
    """Return patterns for fnmatch that fit all chosen names and none of the others.

    A pattern is the name of the outermost module whose names are all chosen, such as `layer1.*`,
    or a single name.

    Args:
        chosen: names to cover.
        names: all names, with the chosen ones; their parts are separated by dots.
    """
    outside = {prefix for name in names if name not in chosen for prefix in _prefixes(name)}
    found = {
        next((f"{glob.escape(p)}*" for p in _prefixes(name) if p not in outside), glob.escape(name))
        for name in chosen
    }
    return sorted(found)


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a name, the outermost first, each with its dot."""
    parts = name.split(".")
    return [".".join(parts[:length]) + "." for length in range(1, len(parts))]
