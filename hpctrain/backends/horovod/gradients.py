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
        self._hvd = hvd
        for full, parameter in trained:
            if parameter.dtype not in _AVERAGED:
                raise UsageError("HT312.type-of-parameter", name=full, parameter=parameter)
        self._names = {parameter: full.partition(".")[2] for full, parameter in trained}
        self._synchronizer = hvd.DistributedOptimizer(
            torch.optim.SGD(list(self._names), lr=0.0),
            named_parameters=trained,
            compression=compression(hvd, options["compression"]),
            op={"average": hvd.Average, "sum": hvd.Sum}[options["op"]],
            gradient_predivide_factor=options["gradient_predivide_factor"],
            groups=options["groups"],
            sparse_as_dense=options["sparse_as_dense"],
        )

    @property
    def size(self) -> int:
        """Number of values of `used`."""
        return 1 + len(self._names)

    @property
    def waits(self) -> bool:
        """Whether gradients of this model are not averaged yet, sent or held back."""
        return bool(self._synchronizer._handles)

    @property
    def sends(self) -> bool:
        """Whether the last backward pass has sent gradients of this model."""
        return any(handle is not None for handle, _ in self._synchronizer._handles.values())

    def used(self) -> list[float]:
        """Return 1 or 0 for the model, and for each parameter: whether it has a gradient."""
        return [float(self.sends), *(float(p.grad is not None) for p in self._names)]

    def unused(self) -> list[str]:
        """Return the names of the trained parameters without a gradient, if the pass sent any."""
        if not self.sends:
            return []
        return [name for p, name in self._names.items() if p.grad is None and p.requires_grad]

    def average(self, ranks: Sequence[float] | None = None) -> bool:
        """Wait until the gradients of the last backward passes are averaged over all ranks.

        Horovod would average zeros for parameters without a gradient. So they are left out if no
        rank has one, and those that were frozen since lose theirs.

        Args:
            ranks: `used` summed over all ranks; None if all ranks have all gradients, or none.

        Returns:
            Whether all ranks have used all trained parameters, or none.
        """
        synchronizer, even = self._synchronizer, True
        if ranks is None:
            if not self.waits:
                return True
            absent = set()
        else:
            sending, *counts = ranks
            if not sending:
                return True
            absent = {p for p, count in zip(self._names, counts, strict=True) if not count}
            trained = [n for p, n in zip(self._names, counts, strict=True) if p.requires_grad]
            even = all(count == self._hvd.size() for count in (sending, *trained))
        all_of_them = synchronizer._requires_update
        synchronizer._requires_update = all_of_them - absent
        try:
            synchronizer.synchronize()
        finally:
            synchronizer._requires_update = all_of_them
        for parameter in self._names:
            if not parameter.requires_grad:
                parameter.grad = None
        return even

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
        return parameter in self._names


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
    # What no rank has used stays as it is; the update of a rank that has not used it is 0.
    every = [p for group in optimizer.param_groups for p in group["params"]]
    there = hvd.allreduce(
        torch.tensor([float(p.grad is not None) for p in every]), name="adasum.used", op=hvd.Sum
    )
    parameters = [p for p, ranks in zip(every, there.tolist(), strict=True) if ranks]
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
