"""Initial weights of prepared models, which each rank reads as far as it needs them."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hpctrain import checkpoint
from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.training.consensus import meet, on_all_ranks, on_rank_zero
from hpctrain.training.context import Context
from hpctrain.training.prepare import inner

__all__ = ["load_weights"]


def load_weights(
    context: Context,
    model: nn.Module,
    source: checkpoint.Source,
    key: str | None,
    prefix: str,
    skip: Sequence[str],
) -> None:
    """Load weights into a prepared model or a part of one; see `Session.load_weights`.

    Called by all ranks. An error of one rank is raised on all of them.
    """
    model, backend = inner(model), context.backend
    meet(backend, "session.load_weights()")
    if not any(model is module for owner in context.models for module in owner.modules()):
        raise UsageError("HT606.model-not-prepared", kind=type(model).__name__)
    if context.resumed:
        logger.info("the run has resumed: the weights stay those of its checkpoint")
        return
    fill = partial(checkpoint.fill_weights, model, source, key=key, prefix=prefix, skip=skip)
    if backend.sharded:
        names = on_all_ranks(backend, lambda: [*fill(read=partial(_read_part, backend))])
    else:
        names = on_rank_zero(backend, lambda: _fill_masters(context, model, fill()))
        masters = [context.precision.master(p) for p in model.parameters()]
        backend.broadcast([t.detach() for t in (*model.parameters(), *masters, *model.buffers())])
    for unfilled in context.unfilled:
        unfilled.fill(model, names)


def _read_part(backend: Backend, weight: checkpoint.Weight, like: Tensor) -> Tensor:
    """Read what this rank has of a weight that is sharded over the ranks."""
    if weight.shape != like.shape or not weight.shape:
        return weight.read(...)
    extent, row = backend.extent(like), max(1, math.prod(weight.shape[1:]))
    rows = weight.read(slice(extent.start // row, extent.stop // row))
    return backend.from_part(rows.to(like.dtype).reshape(-1), like)


def _fill_masters(context: Context, model: nn.Module, loaded: dict[str, Tensor]) -> list[str]:
    """Copy the loaded values to the master weights, unrounded; return their names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            master = context.precision.master(parameter)
            if master is not parameter and name in loaded:
                master.copy_(loaded[name])
    return [*loaded]
