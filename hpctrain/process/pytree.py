"""Nested tuples, lists, dicts and dataclasses of tensors, as batches and model inputs."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(
    function: Callable[[Tensor], Any], things: Any, other: Callable[[Any], Any] | None = None
) -> Any:
    """Return a copy of a nested structure with each tensor replaced.

    The structure may contain tuples (also named tuples), lists, dicts and dataclasses.

    Args:
        function: returns the replacement of a tensor.
        things: structure.
        other: returns the replacement of any other value (default: they do not change).
    """
    if isinstance(things, Tensor):
        return function(things)
    if isinstance(things, dict):
        new = copy.copy(things)  # keeps the class, whose constructor may be special
        for key, value in things.items():
            new[key] = map_tensors(function, value, other)
        return new
    if dataclasses.is_dataclass(things) and not isinstance(things, type):
        fields = [field.name for field in dataclasses.fields(things) if field.init]
        changed = {name: map_tensors(function, getattr(things, name), other) for name in fields}
        return dataclasses.replace(things, **changed)
    if isinstance(things, tuple) and hasattr(things, "_fields"):
        return type(things)(*(map_tensors(function, value, other) for value in things))
    if isinstance(things, (list, tuple)):
        return type(things)(map_tensors(function, value, other) for value in things)
    return things if other is None else other(things)


def tensors_in(things: Any) -> list[Tensor]:
    """Return all tensors in a nested structure, in order."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(add, things)
    return found
