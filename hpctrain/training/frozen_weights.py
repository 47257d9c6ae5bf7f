"""Frozen parameters that checkpoints leave out: a resumed run has to load the same ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.training.context import Context

__all__ = ["digests", "refill", "unchanged"]

_CHUNK = 2**20  # elements that are read at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digests(context: Context) -> list[dict[str, int]]:
    """Return a digest of each frozen parameter by name, for each model; called by all ranks.

    It is the sum of all numbers, each times an odd weight, modulo 2**64, and depends neither on
    the number of ranks nor on the backend.
    """
    backend = context.backend
    own = []
    for model in context.models:
        found = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                part, extent = backend.held(parameter.detach())
                counts = not backend.sharded or backend.rank == extent.ranks[0]
                found[name] = _digest(part, extent.start) if counts else 0
        own.append(found)
    every = backend.gather_object(own)
    if backend.rank == 0 and backend.sharded:
        own = [
            {name: sum(each[name] for each in models) % 2**64 for name in models[0]}
            for models in zip(*every, strict=True)
        ]
    return backend.broadcast_object(own)


def _digest(part: Tensor, start: int) -> int:
    """Return the digest of the elements of a tensor from `start` on."""
    numbers = part.reshape(-1)
    if numbers.is_complex():
        numbers, start = torch.view_as_real(numbers).reshape(-1), 2 * start
    numbers = numbers.view(_BITS[numbers.element_size()])
    total = 0
    for chunk in torch.split(numbers, _CHUNK):
        first = 2 * start + 1
        odd = torch.arange(first, first + 2 * len(chunk), 2, device=chunk.device)
        total += int((chunk.to(torch.int64) * odd).sum())
        start += len(chunk)
    return total % 2**64


def unchanged(context: Context) -> list[dict[str, int]]:
    """Return the frozen parameters that are as they were when the run opened, by their digests.

    A parameter that the run has trained before it was frozen is not among them.
    """
    return [
        {name: digest for name, digest in now.items() if before.get(name) == digest}
        for now, before in zip(digests(context), context.frozen or (), strict=True)
    ]


def refill(
    context: Context, states: Sequence[dict[str, Any]], left_out: Sequence[Mapping[str, int]]
) -> None:
    """Complete the states of models in a checkpoint with the parameters that the script has.

    Args:
        context: context of the training.
        states: states of the models, changed in place.
        left_out: digests of the parameters that the checkpoint does not have.

    Raises:
        UsageError: the script has other values, or trains one of the parameters.
    """
    if not any(left_out):
        return
    for found, model, state, names in zip(
        digests(context), context.models, states, left_out, strict=True
    ):
        other = [name for name, digest in names.items() if found.get(name) != digest]
        if other:
            raise UsageError("HT621.frozen-differ", name=other[0], count=len(other))
        there = model.state_dict()
        state.update({name: there[name] for name in names})
