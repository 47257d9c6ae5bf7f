"""Tensors in tuples, lists and dicts: what a loader gives and a model takes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["map_tensors"]


def map_tensors(function: Callable[[Tensor], Any], things: Any) -> Any:
    """The same tuples (named ones too), lists and dicts with each tensor replaced.

    Args:
        function: gives what a tensor is replaced by.
        things: what is no tensor stays as it is.
    """
    if isinstance(things, Tensor):
        return function(things)
    if isinstance(things, dict):
        return {key: map_tensors(function, value) for key, value in things.items()}
    if isinstance(things, tuple) and hasattr(things, "_fields"):
        return type(things)(*(map_tensors(function, value) for value in things))
    if isinstance(things, (list, tuple)):
        return type(things)(map_tensors(function, value) for value in things)
    return things
