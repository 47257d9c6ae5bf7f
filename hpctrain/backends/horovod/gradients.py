"""The gradients of a model, averaged by Horovod's DistributedOptimizer."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.errors import UsageError

__all__ = ["Gradients", "broadcast", "combine_updates", "compression"]

_AVERAGED = (torch.float16, torch.float32, torch.float64)


class Gradients:
    """Averages the gradients of a model while the backward pass still computes others.

    DistributedOptimizer would be the user's optimizer, of another class, made anew: schedules,
    subclasses and whoever holds the old one would lose it. What averages is all in its hooks and in
    `synchronize()`, so one of its own is given the parameters here, and never takes a step. The
    user's optimizer stays as it is, and what it does is never synchronised twice, which
    `skip_synchronize()` is for.

    Args:
        hvd: `horovod.torch`.
        parameters: of a model, with their names; on their device.
        name: what tells their tensors from those of another model.
        accumulate: backward passes of a step.
        options: of the backend, by the names of DistributedOptimizer.
    """

    def __init__(
        self,
        hvd: ModuleType,
        parameters: Sequence[tuple[str, nn.Parameter]],
        name: str,
        accumulate: int,
        options: Mapping[str, Any],
    ) -> None:
        trained = [(f"{name}.{n}", p) for n, p in parameters]
        for full, parameter in trained:
            if parameter.dtype not in _AVERAGED:
                raise UsageError(
                    f"parameter {full} is {parameter.dtype}, which Horovod cannot average",
                    "float16, float32 or float64",
                    "weights in fp32 and --precision bf16; or --backend ddp",
                )
        self._accumulate = accumulate
        self._parameters = [parameter for _, parameter in trained]
        self._own = set(map(id, self._parameters))
        self._synchronizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._parameters, lr=0.0),
            named_parameters=trained,
            compression=compression(hvd, options["compression"]),
            backward_passes_per_step=accumulate,
            op={"average": hvd.Average, "sum": hvd.Sum}[options["op"]],
            gradient_predivide_factor=options["gradient_predivide_factor"],
            groups=options["groups"],
            sparse_as_dense=options["sparse_as_dense"],
        )

    def average(self) -> None:
        """Wait until every gradient is that of all ranks.

        A model that had no part in the loss has no gradients, on all ranks alike; Horovod would
        average zeros for it, and for what was frozen since.
        """
        if any(parameter.grad is not None for parameter in self._parameters):
            self._synchronizer.synchronize()
            for parameter in self._parameters:
                if not parameter.requires_grad:
                    parameter.grad = None

    def forget(self) -> None:
        """The micro-batches that came since the last average do not count."""
        self._synchronizer.set_backward_passes_per_step(self._accumulate)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether this one averages the gradient of a parameter."""
        return id(parameter) in self._own


def compression(hvd: ModuleType, name: str) -> Any:
    """One of Horovod's, for tensors of any layout: it takes only contiguous ones.

    Args:
        hvd: `horovod.torch`.
        name: "none" or "fp16".
    """
    return _Contiguous(getattr(hvd.Compression, name))


class _Contiguous:
    """One of Horovod's compressors, given contiguous tensors."""

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor

    def compress(self, tensor: Tensor) -> Any:
        """The compressed tensor, and what it takes to decompress it."""
        if tensor.is_sparse:
            raise UsageError(
                "sparse gradients with --horovod-groups",
                "one of the two: Horovod groups dense tensors only",
                "leave --horovod-groups out",
            )
        return self._compressor.compress(tensor.contiguous())

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """The inverse; sparse gradients come without a context, as they were not compressed."""
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

    As Horovod's own optimizer for Adasum does, but with the optimizer as it is. Source: Maleki et
    al., "Scaling Distributed Training with Adaptive Summation", 2021 (arXiv 2006.02924), and
    _DistributedAdasumOptimizer in horovod/torch/optimizer.py, Horovod 0.28.1.

    Args:
        hvd: `horovod.torch`.
        optimizer: whose parameters change.
        step: takes its step.
        compressor: of Horovod, for the updates on their way.
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


def broadcast(hvd: ModuleType, tensors: Sequence[Tensor]) -> None:
    """Give every rank the tensors of rank 0, in place, whatever their layout and type."""
    sent = []
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            own = tensor.detach().contiguous()
            # As bytes: Horovod knows neither bool nor bfloat16 nor complex numbers.
            data = own.reshape(-1).view(torch.uint8)
            sent.append((tensor.detach(), own, hvd.broadcast_async_(data, 0, f"tensor.{number}")))
    for tensor, own, handle in sent:
        hvd.synchronize(handle)
        if own.data_ptr() != tensor.data_ptr():
            tensor.copy_(own)
