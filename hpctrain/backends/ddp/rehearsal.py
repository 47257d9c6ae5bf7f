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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.process import random_states
from hpctrain.process.pytree import map_tensors

__all__ = ["reaches", "rehearse", "rehearse_loss"]


def rehearse(
    wrapped: DistributedDataParallel, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """A forward and a backward pass whose gradients and traces are wiped away.

    What a model keeps besides its buffers, such as a count of its calls, sees one call more.

    Args:
        wrapped: before its first forward pass with gradients.
        inputs, keywords: of that pass.
    """
    device = next(wrapped.module.parameters()).device
    buffers = [_Buffers(module) for module in wrapped.module.modules()]
    random, synchronizes = random_states.capture(device), wrapped.require_backward_grad_sync
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
    random_states.put_back(random, device)
    # The copies of the weights that autocast keeps belong to the pass that is over.
    torch.clear_autocast_cache()
    for parameter in wrapped.module.parameters():
        parameter.grad = None
    for one in buffers:
        one.put_back()


def rehearse_loss(models: Sequence[DistributedDataParallel], loss: Tensor) -> None:
    """A backward pass whose gradients are wiped away, for a loss that no forward pass prepared.

    Args:
        models: all wrapped ones; those that the loss reaches take part.
        loss: of the first step; its graph is kept for the real backward pass.
    """
    modules = [module for model in models for module in model.module.modules()]
    buffers = [_Buffers(module) for module in modules]  # a recomputed forward pass changes them
    device = loss.device
    random = random_states.capture(device)
    attached = loss
    for model in models:
        attached = model.attach(attached)  # type: ignore[operator]
    torch.autograd.backward(attached, retain_graph=True)
    random_states.put_back(random, device)
    for model in models:
        for parameter in model.module.parameters():
            parameter.grad = None
    for one in buffers:
        one.put_back()


def reaches(loss: Tensor, module: nn.Module) -> bool:
    """Whether a loss depends on parameters of a model."""
    wanted = {id(parameter) for parameter in module.parameters()}
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        nodes += [before for before, _ in node.next_functions]
    return False


class _Buffers:
    """The buffers of one module: which tensors they are, and what is in them.

    A forward pass may change them, or put others in their place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = module._buffers
        self._were = [
            (name, buffer, None if buffer is None else buffer.detach().clone())
            for name, buffer in module._buffers.items()
        ]

    def put_back(self) -> None:
        for name, buffer, value in self._were:
            self._places[name] = buffer
            if buffer is not None and value is not None:
                with torch.no_grad():
                    buffer.copy_(value)


def _apart(tensor: Tensor) -> Tensor:
    """The values alone, as the model may change them; what made them is left for the real pass."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
