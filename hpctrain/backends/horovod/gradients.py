"""The averaging of a model's gradients by Horovod's DistributedOptimizer."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.errors import UsageError

__all__ = ["HorovodGradients", "broadcast", "combine_updates", "compression"]

_NEVER = 2**31
_AVERAGED = (torch.float16, torch.float32, torch.float64)


class HorovodGradients:
    """The averaging of a model's gradients, while the backward pass still computes others.

    DistributedOptimizer would replace the user's optimizer with a new object of another class:
    schedules, subclasses and other references to the old one would not work. All of the averaging
    is in its hooks and in `synchronize()`. So a separate DistributedOptimizer gets the parameters
    here, and never takes a step. The user's optimizer stays as it is, and gradients are never
    synchronized twice, which `skip_synchronize()` is for.

    Args:
        hvd: `horovod.torch`.
        parameters: parameters of a model with their names, on their device.
        name: prefix that separates their tensors from those of another model.
        options: options of the backend, by the names of DistributedOptimizer.
    """

    def __init__(
        self,
        hvd: ModuleType,
        parameters: Sequence[tuple[str, nn.Parameter]],
        name: str,
        options: Mapping[str, Any],
    ) -> None:
        trained = [(f"{name}.{n}", p) for n, p in parameters]
        for full, parameter in trained:
            if parameter.dtype not in _AVERAGED:
                raise UsageError("HT312.type-of-parameter", name=full, parameter=parameter)
        self._parameters = [parameter for _, parameter in trained]
        self._own = set(map(id, self._parameters))
        self._synchronizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._parameters, lr=0.0),
            named_parameters=trained,
            compression=compression(hvd, options["compression"]),
            op={"average": hvd.Average, "sum": hvd.Sum}[options["op"]],
            gradient_predivide_factor=options["gradient_predivide_factor"],
            groups=options["groups"],
            sparse_as_dense=options["sparse_as_dense"],
        )

    def average(self) -> None:
        """Wait until the gradients of the last backward passes are averaged over all ranks.

        A model that had no part in them has sent none, on any rank. Horovod would average zeros for
        it, and for parameters that were frozen since.
        """
        if self._synchronizer._handles:
            self._synchronizer.synchronize()
            for parameter in self._parameters:
                if not parameter.requires_grad:
                    parameter.grad = None

    def send(self, wanted: bool) -> None:
        """Let the hooks send gradients at the next backward pass, or hold them back.

        They send after as many passes as `backward_passes_per_step`.
        """
        self._synchronizer.set_backward_passes_per_step(1 if wanted else _NEVER)

    def forget(self) -> None:
        """Drop the gradients that were held back."""
        self._synchronizer._handles.clear()

    def has(self, parameter: nn.Parameter) -> bool:
        """Check whether this object averages the gradient of a parameter."""
        return id(parameter) in self._own


def compression(hvd: ModuleType, name: str) -> Any:
    """Return one of Horovod's compressors, changed to accept tensors that are not contiguous.

    Args:
        hvd: `horovod.torch`.
        name: name of the compression, "none" or "fp16".
    """
    return _Contiguous(getattr(hvd.Compression, name))


class _Contiguous:
    """A wrapper that gives contiguous tensors to one of Horovod's compressors."""

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor

    def compress(self, tensor: Tensor) -> Any:
        """Return the compressed tensor, and the context to decompress it."""
        if tensor.is_sparse:
            raise UsageError("HT312.groups-of-sparse-gradients")
        return self._compressor.compress(tensor.contiguous())

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Return the original tensor; sparse gradients have no context, as not compressed."""
        if context is None:
            return tensor
        plain: Tensor = self._compressor.decompress(tensor, context)
        return plain


def combine_updates(
    hvd: ModuleType,
    optimizer: Optimizer,
    step: Callable[[Optimizer], None],
    compressor: Any,
) -> None:
    """Take a step on this rank's gradients, and combine the ranks' updates by Adasum.

    Horovod's own optimizer for Adasum does the same, but here the optimizer stays as it is. Source:
    Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2021 (arXiv 2006.02924),
    and _DistributedAdasumOptimizer in horovod/torch/optimizer.py, Horovod 0.28.1.

    Args:
        hvd: `horovod.torch`.
        optimizer: optimizer whose parameters change.
        step: function that takes the optimizer step.
        compressor: compressor from `compression`, for the updates that are sent.
    """
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    before = [parameter.detach().clone() for parameter in parameters]
    step(optimizer)
    packed = [
        compressor.compress(parameter.detach() - old)
        for parameter, old in zip(parameters, before, strict=True)
    ]
    handles = [
        hvd.allreduce_async_(update, name=f"adasum.{number}", op=hvd.Adasum)
        for number, (update, _) in enumerate(packed)
    ]
    with torch.no_grad():
        for parameter, old, handle, (_, context) in zip(
            parameters, before, handles, packed, strict=True
        ):
            update = compressor.decompress(hvd.synchronize(handle), context)
            parameter.copy_(old + update)


def broadcast(hvd: ModuleType, tensors: Sequence[Tensor], source: int) -> None:
    """Copy the tensors of one rank to every rank, in place, whatever their layout and type."""
    sent = []
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            own = tensor.detach().contiguous()
            # As bytes: Horovod supports neither bool nor bfloat16 nor complex numbers.
            data = own.reshape(-1).view(torch.uint8)
            handle = hvd.broadcast_async_(data, source, f"tensor.{number}")
            sent.append((tensor.detach(), own, handle))
    for tensor, own, handle in sent:
        hvd.synchronize(handle)
        if own.data_ptr() != tensor.data_ptr():
            tensor.copy_(own)
