"""Helpers for all figures of runs: check of imports, legends, grouping of metrics."""

import importlib
from collections.abc import Iterable
from typing import Any, TypeGuard

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError

__all__ = ["HEADS", "is_number", "legend", "need", "panel_of"]

# Fields of each row of metrics.jsonl that are positions on a curve and no metrics.
HEADS = ("step", "epoch", "time")


def need(extra: str, *modules: str) -> None:
    """Import the modules for drawing.

    Args:
        extra: extra of hpctrain that installs the modules.
        modules: modules to import.

    Raises:
        UsageError: a module is not installed.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            name = module.partition(".")[0]
            raise UsageError(
                "HT651",
                f"{name} cannot be imported: {error}",
                f"{name}, which draws",
                f"pip install 'hpctrain[{extra}]'",
            ) from None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value of a row can be drawn; True and False are no numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def panel_of(name: str) -> str:
    """Return the title of a metric's panel: loss, accuracy, or the metric's name."""
    return "loss" if "loss" in name else "accuracy" if name.startswith("top") else name


def legend(parent: Any, lines: Iterable[Any], names: Iterable[str], **more: Any) -> None:
    """Add a legend that shows any text unchanged.

    Args:
        parent: axes or figure of matplotlib.
        lines: lines of the curves.
        names: names of the curves.
        more: additional arguments of matplotlib's legend.
    """
    labels = [printable(name) for name in names]
    for text in parent.legend(list(lines), labels, **more).get_texts():
        text.set_parse_math(False)
