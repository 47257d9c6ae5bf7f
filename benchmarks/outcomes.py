"""Outcomes on targets, read from the records of benchmarks; no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from measure import describe

__all__ = ["outcomes"]

# Figures to which targets apply; the first one present is used.
_JUDGED = ("ratio", "times_base", "more_ms", "more_us")
# Keys of a target, and on which side of the limit it is met.
_LIMITS = {"limit": "≤ ", "at_least": "≥ ", "target_ms": "≤ ", "target": "≤ "}
_NOT_NAMES = {"results", "sizes", "targets", "target"}


def outcomes(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield each outcome of a record: its subject, the figure with interval, target, outcome.

    Args:
        record: record as a benchmark saves it; a part with an `outcome` also holds its target.
    """
    yield from _within(record, [])


def _within(
    node: Any, path: list[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield the outcomes of a part of a record.

    Args:
        node: part of the record.
        path: keys that lead to the part, each with the parent that holds the key.
    """
    if not isinstance(node, Mapping):
        return
    if "outcome" in node:
        key = next((key for key in _LIMITS if key in node), "")
        limit = node.get(key, "")
        unit = " ms" if key == "target_ms" else ""
        target = limit if isinstance(limit, str) else f"{_LIMITS[key]}{limit:g}{unit}"
        names = [name for name, _ in path if name not in _NOT_NAMES]
        yield ", ".join(names), _figure(node, path, target), target, node["outcome"]
    for key, value in node.items():
        yield from _within(value, [*path, (key, node)])


def _figure(node: Mapping[str, Any], path: list[tuple[str, Mapping[str, Any]]], target: str) -> str:
    """Return the figure of an outcome, which is beside the outcome or in a parent."""
    around = [node, *(parent for _, parent in reversed(path[-2:]))]
    around += [
        arms["hpctrain"] for place in around if "hpctrain" in (arms := place.get("arms", {}))
    ]
    keys = ("us",) if target.endswith("µs") else (path[-1][0], *_JUDGED) if path else _JUDGED
    for place in around:
        for key in keys:
            figures = place.get(key)
            if isinstance(figures, Mapping) and "median" in figures:
                return describe(figures, ".3f" if abs(figures["median"]) < 10 else ".1f")
    return ""
