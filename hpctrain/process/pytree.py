"""Tensors in tuples, lists and dicts: what a loader gives and a model takes."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["map_tensors"]


def map_tensors(function: Callable[[Tensor], Any], things: Any) -> Any:
    """The same tuples (named ones too), lists, dicts and dataclasses with each tensor replaced.

    Args:
        function: gives what a tensor is replaced by.
        things: what is no tensor stays as it is.
    """
    if isinstance(things, Tensor):
        return function(things)
    if isinstance(things, dict):
        new = copy.copy(things)  # of the same class, which may be made in its own way
        for key, value in things.items():
            new[key] = map_tensors(function, value)
        return new
    if dataclasses.is_dataclass(things) and not isinstance(things, type):
        fields = [field.name for field in dataclasses.fields(things) if field.init]
        changed = {name: map_tensors(function, getattr(things, name)) for name in fields}
        return dataclasses.replace(things, **changed)
    if isinstance(things, tuple) and hasattr(things, "_fields"):
        return type(things)(*(map_tensors(function, value) for value in things))
    if isinstance(things, (list, tuple)):
        return type(things)(map_tensors(function, value) for value in things)
    return things
