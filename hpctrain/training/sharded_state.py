"""State of the ranks in a checkpoint: what each rank writes of it, and what it reads.

Ranks with the same weights divide the bytes among them. A backend such as FSDP, whose ranks hold
parts, writes and reads these parts.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.backends.extent import Extent
from hpctrain.checkpoint import Stored
from hpctrain.process.pytree import map_tensors
from hpctrain.training.context import Context

__all__ = ["divide", "held", "names_of_groups"]


def held(context: Context, state: dict[str, Any]) -> tuple[dict[str, Any], dict[int, Extent]]:
    """Return a state with what this rank holds of each tensor, and which part that is.

    The parts are of what is the same on all ranks or divided among them: parameters and
    optimizer states. Called by all ranks.

    Args:
        context: context of the training.
        state: result of `state.gather`.

    Returns:
        The state, and the extent of each of those tensors by its id.
    """
    extents: dict[int, Extent] = {}

    def own(tensor: Tensor) -> Tensor:
        part, extent = context.backend.held(tensor)
        extents[id(part)] = extent
        return part

    models = []
    for model, values in zip(context.models, state["model"], strict=True):
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        models.append(copy.copy(values))  # with the versions of the modules
        for name in values:
            if name in names:
                models[-1][name] = own(values[name])
    return {**state, "model": models, "optimizer": map_tensors(own, state["optimizer"])}, extents


def divide(context: Context, state: Mapping[str, Any]) -> None:
    """Choose what this rank reads of the tensors in a checkpoint.

    Args:
        context: context of the training.
        state: state of an `Opened` checkpoint.
    """
    if not context.backend.sharded:
        return
    for values, name, like in _places(context, state):
        extent = context.backend.extent(like)
        convert = partial(context.backend.from_part, like=like)
        if isinstance(values[name], Stored):
            values[name].divide(extent.start, extent.stop, convert)
        else:  # a tensor in the file of its part
            part = values[name].reshape(-1)[extent.start : extent.stop]
            values[name] = convert(part.clone())  # not a view, which keeps the whole tensor


def names_of_groups(context: Context, optimizer: Optimizer) -> list[list[tuple[int, str]]]:
    """Return the model index and name of each parameter, by group of an optimizer."""
    names = {
        id(context.precision.master(parameter)): (number, name)
        for number, model in enumerate(context.models)
        for name, parameter in model.named_parameters()
    }
    return [
        [names.get(id(parameter), (-1, "")) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def _places(
    context: Context, state: Mapping[str, Any]
) -> Iterator[tuple[dict[Any, Any], Any, Tensor]]:
    """Yield where a state has a tensor that is divided as a parameter of this rank."""
    models = [dict(model.named_parameters(remove_duplicate=False)) for model in context.models]
    found = [
        (values, name, parameters[name])
        for values, parameters in zip(state["model"], models, strict=False)
        for name in values.keys() & parameters.keys()
    ]
    for saved, names in zip(state["optimizer"], state["position"]["groups"], strict=True):
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        for number, (model, name) in zip(numbers, chain.from_iterable(names), strict=False):
            like = models[model].get(name) if 0 <= model < len(models) else None
            if like is not None:
                values = saved["state"].get(number, {})
                found += [(values, key, like) for key in values]
    for values, name, like in found:
        if isinstance(values[name], (Tensor, Stored)) and values[name].shape == like.shape:
            yield values, name, like
