"""Replica check: averaged gradients have to give all ranks the same weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import UsageError
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.context import Context

__all__ = ["refuse_unlike_weights"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_unlike_weights(context: Context, step: int) -> None:
    """Compare weights and optimizer states between the ranks; called by all of them.

    For each tensor, the ranks compare the sum of its bits, read as whole numbers. This reads all
    tensors once, and exchanges 8 bytes per tensor.

    Args:
        context: context of the training.
        step: step of the run, for the error message.

    Raises:
        UsageError: they differ, so no result of the training can be trusted.
    """
    if context.backend.world_size == 1:
        return
    named = list(_tensors(context))
    # One tensor of sums per device, so that the host waits for a GPU only once.
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, tensor in named:
        by_device.setdefault(tensor.device, []).append(_bits(tensor))
    numbers = [iter(torch.stack(bits).tolist()) for bits in by_device.values()]
    at = dict(zip(by_device, numbers, strict=True))
    seen = context.backend.gather_object([next(at[tensor.device]) for _, tensor in named])

    def compare() -> None:
        unlike = [rank for rank, one in enumerate(seen) if one != seen[0]]
        if not unlike:
            return
        other = seen[unlike[0]]
        if len(other) == len(seen[0]):
            first = next(n for n, (a, b) in enumerate(zip(other, seen[0], strict=True)) if a != b)
            what = f"first in {named[first][0]}"
        else:
            what = f"{len(other)} tensors there, {len(seen[0])} at rank 0"
        raise UsageError(
            "HT612",
            f"after step {step} {ranks_text(unlike)} and rank 0 do not have the same weights: "
            f"{what}",
            "that every gradient is averaged over the ranks, and that nothing else moves the "
            "weights",
            "session.step(loss) for the backward pass",
            "make each optimizer of the parameters of prepared models",
            "the same seed and the same steps on all ranks; docs/pitfalls.md has more",
        )

    on_rank_zero(context.backend, compare)


def _tensors(context: Context) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and states that have to be the same on all ranks, with names for messages."""
    names: dict[int, str] = {}
    for number, model in enumerate(context.models):
        model_name = f"model {number}, " if len(context.models) > 1 else ""
        for name, parameter in model.named_parameters():
            weights = context.precision.master(parameter)
            names[id(weights)] = f"{model_name}{name}"
            yield f"{model_name}{name}", weights.detach()
    for optimizer in context.optimizers:
        for key, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    where = names.get(id(key), "a parameter")
                    yield f"{name} of {type(optimizer).__name__} for {where}", value.detach()


def _bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as whole numbers, of shape ()."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    return tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
