"""What figures of runs share without the packages that draw: check of imports, numbers of a row."""

import importlib
from typing import Any, TypeGuard

from hpctrain.errors import UsageError

__all__ = ["HEADS", "is_number", "need"]

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
    return type(value) in (int, float)
