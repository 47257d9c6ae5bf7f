"""Bit-equal resumes: let DistributedDataParallel arrange its messages before the first step.

After the first backward pass of a process torch rearranges the messages that carry the gradients,
by the order in which the gradients came (`Reducer::rebuild_buckets`, torch/csrc/distributed/c10d/
reducer.cpp, torch 2.15). At three ranks and more another arrangement is another order of sums. So
the first step of a process that resumes would differ in its last bits from the same step of a
process that has been at it for long. A rehearsed backward pass puts the first step of every
process behind the rearrangement.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hpctrain.nested import map_tensors

__all__ = ["rehearse"]


def rehearse(
    wrapped: DistributedDataParallel, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """A forward and a backward pass whose gradients and traces are wiped away.

    What a model keeps besides its buffers, such as a count of its calls, sees one call more.

    Args:
        wrapped: before its first forward pass with gradients.
        inputs, keywords: of that pass.
    """
    own = [*wrapped.module.buffers()]
    before = [buffer.detach().clone() for buffer in own]
    synchronizes = wrapped.require_backward_grad_sync
    device = next(wrapped.module.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        wrapped.require_backward_grad_sync = True
        found = DistributedDataParallel.forward(  # type: ignore[no-untyped-call]
            wrapped, *map_tensors(_apart, list(inputs)), **map_tensors(_apart, dict(keywords))
        )
        outputs: list[Tensor] = []
        map_tensors(outputs.append, found)
        parts = [output.sum() for output in outputs if output.requires_grad]
        if parts:
            torch.autograd.backward(parts)
    wrapped.require_backward_grad_sync = synchronizes
    # The copies of the weights that autocast keeps belong to the pass that is over.
    torch.clear_autocast_cache()
    for parameter in wrapped.module.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, value in zip(own, before, strict=True):
            buffer.copy_(value)


def _apart(tensor: Tensor) -> Tensor:
    """The values alone: what made them is left for the real pass."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
