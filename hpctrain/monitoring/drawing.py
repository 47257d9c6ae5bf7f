"""What all figures of runs share: matplotlib or what to type, plain texts, who goes together."""

import importlib
from collections.abc import Iterable
from typing import Any, TypeGuard

from hpctrain.errors import UsageError

__all__ = ["HEADS", "is_number", "legend", "need", "panel_of", "plain"]

# What every row of metrics.jsonl begins with: places of a curve, and no curves.
HEADS = ("step", "epoch", "time")


def need(extra: str, *modules: str) -> None:
    """Import what draws.

    Args:
        extra: of hpctrain, whose packages they are.
        modules: to import.

    Raises:
        UsageError: one is not installed.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            name = module.partition(".")[0]
            raise UsageError(
                f"{name} cannot be imported: {error}",
                f"{name}, which draws",
                f"pip install 'hpctrain[{extra}]'",
            ) from None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a row can be drawn; True and False are no numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def panel_of(name: str) -> str:
    """The title of the panel in which a metric is drawn: loss, accuracy, or its own name."""
    return "loss" if "loss" in name else "accuracy" if name.startswith("top") else name


def plain(text: str) -> str:
    """A text without what no font has, and never empty; $ stays a $ where math is not parsed."""
    return "".join(one if one.isprintable() else "?" for one in text) or " "


def legend(parent: Any, lines: Iterable[Any], names: Iterable[str], **more: Any) -> None:
    """A legend that shows any text as it is.

    Args:
        parent: axes or figure of matplotlib.
        lines: of the curves.
        names: of the curves.
        more: of matplotlib's legend.
    """
    for text in parent.legend(list(lines), list(map(plain, names)), **more).get_texts():
        text.set_parse_math(False)
