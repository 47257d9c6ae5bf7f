"""What the records of benchmarks say of their targets. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from measure import describe

__all__ = ["verdicts"]

# The figures that targets are for, the first one that is there.
_JUDGED = ("ratio", "times_base", "more_ms", "more_us")
# How a target is named, and which side of it is good.
_LIMITS = {"limit": "≤ ", "at_least": "≥ ", "target_ms": "≤ ", "target": "≤ "}
_NOT_NAMES = {"results", "sizes", "targets", "target"}


def verdicts(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Each verdict of a record: of what, the figure with its interval, the target, the verdict.

    Args:
        record: as a benchmark saves it; whatever in it has a `verdict` has its target beside.
    """
    yield from _within(record, [])


def _within(
    node: Any, path: list[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[str, str, str, str]]:
    """The verdicts of a part of a record.

    Args:
        node: the part.
        path: the keys that lead to it, each with the part that it is a key of.
    """
    if not isinstance(node, Mapping):
        return
    if "verdict" in node:
        key = next((key for key in _LIMITS if key in node), "")
        limit = node.get(key, "")
        unit = " ms" if key == "target_ms" else ""
        target = limit if isinstance(limit, str) else f"{_LIMITS[key]}{limit:g}{unit}"
        names = [name for name, _ in path if name not in _NOT_NAMES]
        yield ", ".join(names), _figure(node, path, target), target, node["verdict"]
    for key, value in node.items():
        yield from _within(value, [*path, (key, node)])


def _figure(node: Mapping[str, Any], path: list[tuple[str, Mapping[str, Any]]], target: str) -> str:
    """What a verdict is of: beside it, or above it, where the verdict is a part of its own."""
    around = [node, *(parent for _, parent in reversed(path[-2:]))]
    around += [
        arms["hpctrain"] for place in around if "hpctrain" in (arms := place.get("arms", {}))
    ]
    wanted = ("us",) if target.endswith("µs") else (path[-1][0], *_JUDGED) if path else _JUDGED
    for place in around:
        for key in wanted:
            figures = place.get(key)
            if isinstance(figures, Mapping) and "median" in figures:
                return describe(figures, ".3f" if abs(figures["median"]) < 10 else ".1f")
    return ""
