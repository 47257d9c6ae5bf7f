"""Nested tuples, lists, dicts and dataclasses of tensors, as batches and model inputs."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(
    function: Callable[[Tensor], Any],
    things: Any,
    other: Callable[[Any], Any] | None = None,
    at_list: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Return a copy of a nested structure with each tensor replaced.

    The structure may contain tuples (also named tuples), lists, dicts and dataclasses.

    Args:
        function: returns the replacement of a tensor.
        things: structure.
        other: returns the replacement of any other value (default: they do not change).
        at_list: returns the replacement of a list, or NotImplemented to replace what is in it.
    """
    if isinstance(things, Tensor):
        return function(things)
    if at_list is not None and isinstance(things, list):
        replacement = at_list(things)
        if replacement is not NotImplemented:
            return replacement

    def replaced(value: Any) -> Any:
        return map_tensors(function, value, other, at_list)

    new = things
    if isinstance(things, dict):
        new = copy.copy(things)  # keeps the class, whose constructor may be special
        for key, value in things.items():
            new[key] = replaced(value)
    elif dataclasses.is_dataclass(things) and not isinstance(things, type):
        fields = [field.name for field in dataclasses.fields(things) if field.init]
        changed = {name: replaced(getattr(things, name)) for name in fields}
        new = dataclasses.replace(things, **changed)
    elif isinstance(things, tuple) and hasattr(things, "_fields"):
        new = type(things)(*map(replaced, things))
    elif isinstance(things, (list, tuple)):
        new = type(things)(map(replaced, things))
    elif other is not None:
        new = other(things)
    return new


def tensors_in(things: Any) -> list[Tensor]:
    """Return all tensors in a nested structure, in order."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(add, things)
    return found
