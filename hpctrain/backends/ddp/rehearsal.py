"""A rehearsal before the first step of a process, so that resumed runs are bit-equal.

After the first backward pass of a process torch rearranges the messages that carry the gradients,
by the order in which the gradients were ready (`Reducer::rebuild_buckets`, torch/csrc/distributed/
c10d/reducer.cpp, torch 2.15). With three or more ranks, another arrangement means another order of
sums. So the first step of a resumed process would differ in its last bits from the same step of a
process that was not interrupted. With a rehearsed backward pass, the rearrangement comes before the
first step of every process.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hpctrain.backends.trained_parameters import reached
from hpctrain.errors import UsageError
from hpctrain.process import random_states
from hpctrain.process.pytree import map_tensors

__all__ = ["rehearse", "rehearse_loss"]


def rehearse(
    wrapped: DistributedDataParallel, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Run a forward and a backward pass, and discard their gradients and side effects.

    The backward pass is left out if the outputs on some rank do not depend on all parameters, and
    the model does not expect that: the ranks would wait for each other. The real backward pass
    then finds these parameters, and is rehearsed itself.

    State of a model other than its buffers, such as a count of its calls, includes this extra call.

    Args:
        wrapped: wrapped model, before its first forward pass with gradients.
        inputs, keywords: arguments of that pass.
    """
    synchronizes = wrapped.require_backward_grad_sync
    unused_allowed = wrapped.find_unused_parameters or wrapped.static_graph
    with _discarded([wrapped], next(wrapped.module.parameters()).device):
        # A reducer that a forward pass has prepared refuses the next one before its backward pass.
        # So without a backward pass, as below, it must not be prepared.
        wrapped.require_backward_grad_sync = unused_allowed
        found = DistributedDataParallel.forward(  # type: ignore[no-untyped-call]
            wrapped,
            *map_tensors(_detached_copy, list(inputs)),
            **map_tensors(_detached_copy, dict(keywords)),
        )
        outputs: list[Tensor] = []
        map_tensors(outputs.append, found)
        parts = [output.sum() for output in outputs if output.requires_grad]
        runs = unused_allowed or _complete(wrapped, parts)  # on all ranks, so also parts
        if runs and not unused_allowed:
            parts = [wrapped.attach(sum(parts))]  # type: ignore[operator]
        if parts and runs:
            torch.autograd.backward(parts)
        wrapped.require_backward_grad_sync = synchronizes
    # The weight copies in autocast's cache belong to the pass that is over.
    torch.clear_autocast_cache()


def rehearse_loss(models: Sequence[DistributedDataParallel], loss: Tensor) -> None:
    """Run a backward pass and discard its gradients, for a loss that no forward pass prepared.

    Args:
        models: wrapped models that the loss uses.
        loss: loss of the first step; its graph is kept for the real backward pass.
    """
    with _discarded(models, loss.device):  # a recomputed forward pass changes buffers
        attached = loss
        for model in models:
            attached = model.attach(attached)  # type: ignore[operator]
        torch.autograd.backward(attached, retain_graph=True)


def _complete(wrapped: DistributedDataParallel, outputs: Sequence[Tensor]) -> bool:
    """Check whether outputs depend on all trained parameters, on all ranks."""
    used = reached(*outputs)
    trained = [id(parameter) for parameter in wrapped.parameters() if parameter.requires_grad]
    unused = used is not None and not used.issuperset(trained)
    found = torch.tensor(float(unused), device=next(wrapped.parameters()).device)
    dist.all_reduce(found)
    return not found.item()


@contextlib.contextmanager
def _discarded(models: Sequence[DistributedDataParallel], device: torch.device) -> Iterator[None]:
    """Discard the gradients of a rehearsal, and restore what was before it.

    These are random numbers, buffers and the gradients of earlier micro-batches. A forward pass may
    change the tensors of buffers or replace them; gradients may be views of the messages.
    """
    random = random_states.capture(device)
    buffers = [
        (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for model in models
        for module in model.module.modules()
        for name, buffer in module._buffers.items()
    ]
    parameters = [one for model in models for one in model.module.parameters()]
    values = _values(parameters)
    gradients = [None if one.grad is None else one.grad.clone() for one in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    random_states.put_back(random, device)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    _put_back_values(parameters, values)
    for places, name, buffer, value in buffers:
        places[name] = buffer
        # A write would forbid the backward pass of a graph that has read the buffer, as that of
        # batch norm in eval mode.
        if buffer is not None and value is not None and not torch.equal(buffer, value):
            with torch.no_grad():
                buffer.copy_(value)


def _values(parameters: Sequence[Tensor]) -> list[Any]:
    """Return copies of parameters; if they are large, numbers that tell whether they change.

    A forward pass may change them, as that of MoCo does with its momentum encoder.
    """
    if sum(one.numel() * one.element_size() for one in parameters) <= _MAX_BYTES:
        return [one.detach().clone() for one in parameters]
    return [(one._version, one.data_ptr()) for one in parameters]


def _put_back_values(parameters: Sequence[Tensor], values: Sequence[Any]) -> None:
    """Restore the values of parameters.

    Raises:
        UsageError: large parameters have changed, of which there are no copies.
    """
    for parameter, value in zip(parameters, values, strict=True):
        if not isinstance(value, Tensor):
            if value != (parameter._version, parameter.data_ptr()):
                raise UsageError("HT612.parameters-changed")
        elif not torch.equal(parameter, value):  # another write would count as a change of it
            with torch.no_grad():
                parameter.copy_(value)


# Copies of larger models could exceed the memory of a device.
_MAX_BYTES = 2**30


def _detached_copy(tensor: Tensor) -> Tensor:
    """Return a copy that the model may change, without the graph, which the real pass needs."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
