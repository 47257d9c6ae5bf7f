"""Plain values and random number generators in checkpoints, which a resume fills in place."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["copied", "fill", "is_plain", "of_rank"]

_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator)


def is_plain(thing: Any) -> bool:
    """Return whether this is a dict, list, tensor or generator without a `state_dict()`."""
    kinds = (dict, list, Tensor, *_GENERATORS)
    return isinstance(thing, kinds) and not hasattr(thing, "state_dict")


def copied(thing: Any) -> Any:
    """Return a copy on the CPU, in types that `torch.load(weights_only=True)` accepts.

    Args:
        thing: object for which `is_plain` is true. Other values in its dicts and lists are not
            copied.
    """
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, numpy.random.Generator):
        return _without_arrays(thing.bit_generator.state)
    return _values(thing)


def _values(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: _values(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [_values(value) for value in thing]
    if isinstance(thing, Tensor):
        return thing.detach().cpu().clone()
    return thing.item() if isinstance(thing, numpy.generic) else thing


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray) else state


def fill(thing: Any, saved: Any) -> bool:
    """Fill an object in place from its copy; return whether they fit.

    Names of a dict that the copy lacks keep their values.

    Args:
        thing: object for which `is_plain` is true.
        saved: result of `copied`.
    """
    try:
        if isinstance(thing, torch.Generator):
            thing.set_state(saved)
        elif isinstance(thing, random.Random):
            thing.setstate(saved)
        elif isinstance(thing, numpy.random.Generator):
            thing.bit_generator.state = saved
        else:
            return _filled(thing, saved) is thing
    except (TypeError, ValueError, KeyError, RuntimeError):  # the state of another kind
        return False
    return True


def _filled(thing: Any, saved: Any) -> Any:
    """Return a value filled from its copy, or the copy if it is of another kind or shape.

    What a dict holds is filled in place too, as the script may have other names for it.
    """
    if isinstance(thing, dict) and isinstance(saved, dict):
        for key, value in saved.items():
            thing[key] = _filled(thing.get(key), value)
    elif isinstance(thing, list) and isinstance(saved, list):
        thing[:] = saved
    elif isinstance(thing, Tensor) and isinstance(saved, Tensor) and thing.shape == saved.shape:
        with torch.no_grad():
            thing.copy_(saved)
    else:
        return saved
    return thing


def of_rank(
    things: Mapping[str, Any], ranks: Sequence[dict[str, Any]], rank: int, size: int
) -> Any:
    """Return the copies for a rank, by name.

    If the number of ranks has changed, they are those of rank 0, but without the generators that
    were not equal on all ranks.

    Args:
        things: objects to fill, by name.
        ranks: copies by name, of each rank of the checkpoint.
        rank, size: this rank, and the number of ranks now.
    """
    if len(ranks) == size:
        return ranks[rank]
    return {
        name: saved
        for name, saved in ranks[0].items()
        if not isinstance(things.get(name), _GENERATORS)
        or all(_equal(one.get(name), saved) for one in ranks)
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
