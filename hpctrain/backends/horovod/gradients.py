"""The averaging of a model's gradients by Horovod's DistributedOptimizer."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.errors import UsageError

__all__ = ["HorovodGradients", "average", "broadcast", "combine_updates", "compression"]

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
        self._compressor = compression(hvd, options["compression"])
        self._synchronizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._parameters, lr=0.0),
            named_parameters=trained,
            compression=self._compressor,
            op={"average": hvd.Average, "sum": hvd.Sum}[options["op"]],
            gradient_predivide_factor=options["gradient_predivide_factor"],
            groups=options["groups"],
            sparse_as_dense=options["sparse_as_dense"],
        )
        self._number, self._factor = len(trained), options["gradient_predivide_factor"]
        self._groups = list(self._synchronizer._group_counts)

    def pending(self) -> bool:
        """Check whether this rank has gradients that are not averaged yet."""
        return bool(self._synchronizer._handles)

    def shares(self) -> list[bool]:
        """Return what this rank contributes to the next averaging.

        Returns:
            For each parameter whether there is a gradient, then for each whether it is sparse, then
            for each group whether it was sent as one, and whether the last pass has reached any.
        """
        handles = self._synchronizer._handles
        reached = 0 in self._synchronizer._allreduce_delay.values()
        keys = [key if isinstance(key, tuple) else (key,) for key in handles]
        ids = {id(parameter) for key in keys for parameter in key}
        present = [id(parameter) in ids for parameter in self._parameters]
        gradients = [
            p.grad if here else None for p, here in zip(self._parameters, present, strict=True)
        ]
        sparse = [gradient is not None and gradient.is_sparse for gradient in gradients]
        return [*present, *sparse, *(group in handles for group in self._groups), reached]

    def all_sent(self, shares: Sequence[bool]) -> bool:
        """Check whether this rank lacks nothing that another rank may have.

        Args:
            shares: this rank's `shares`.
        """
        *mine, reached = shares
        return reached and all(mine[-len(self._groups) :] if self._groups else mine[: self._number])

    def exchange(self, hvd: ModuleType, shares: Sequence[bool]) -> int:
        """Begin to sum the shares of all ranks; return the handle, for `hvd.synchronize`.

        They are sent like a gradient, with the same type, operation and factors. So Horovod puts
        them into the message of the last gradients, and with 2 ranks over gloo they take 0.2 ms or
        less. A message of their own takes 1 ms.
        """
        like, factor = self._parameters[0], self._factor
        flags = torch.tensor(shares, dtype=like.dtype, device=like.device)
        sums, _ = self._compressor.compress(flags)
        handle: int = hvd.allreduce_async_(
            sums,
            name=f"shares.{len(shares)}",  # parameters that are unfrozen later have shares, too
            op=self._synchronizer.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
        )
        return handle

    def fill(self, shares: Sequence[float]) -> None:
        """Send zeros for what this rank lacks and another rank has; called before `wait`.

        Args:
            shares: sums of the `shares` of all ranks.
        """
        synchronizer, number = self._synchronizer, self._number
        used = [p for p, share in zip(self._parameters, shares, strict=False) if share]
        for parameter, share in zip(self._parameters, shares[number:], strict=False):
            if share and parameter.grad is None:
                parameter.grad = _no_rows(parameter)  # Horovod's own zeros are dense
        for group, share in zip(self._groups, shares[2 * number : -1], strict=True):
            if share and group not in synchronizer._handles:
                for parameter in group:
                    synchronizer._handles.pop(parameter, None)
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                sent = synchronizer._grouped_allreduce_grad_async(group)
                synchronizer._handles[group] = sent
        # `synchronize` sends zeros for all of these.
        synchronizer._requires_update = set(used)

    def wait(self) -> None:
        """Wait until the gradients are averaged."""
        self._synchronizer.synchronize()

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


def average(hvd: ModuleType, averagers: Sequence[HorovodGradients], held: bool) -> None:
    """Average the gradients of the last backward passes over all ranks; called by all ranks.

    A rank without a gradient for a parameter sends zeros, if another rank has one. If no rank has
    one, nothing is sent and the gradient stays as it was: None, or averaged after an earlier pass.
    An optimizer leaves a parameter without a gradient alone, but decays and moves one whose
    gradient is zero. Horovod would send zeros for both.

    So the ranks exchange in every step which gradients they have, as this costs little: see
    `HorovodGradients.exchange`. (ddp looks for missing gradients in its first steps only, or has to
    be told, since it pays for that in every step.)

    Args:
        hvd: `horovod.torch`.
        averagers: averagers of all models; one or more.
        held: whether to average also what was held back in earlier passes, for models of which the
            last pass has reached nothing on any rank.
    """
    shares = [averager.shares() for averager in averagers]
    handle = averagers[0].exchange(hvd, [share for own in shares for share in own])
    lacks = not all(one.all_sent(own) for one, own in zip(averagers, shares, strict=True))
    if lacks:  # else the sums tell this rank nothing, and a GPU need not be waited for
        sums = iter(hvd.synchronize(handle).tolist())
        for averager, own in zip(averagers, shares, strict=True):
            ranks = list(islice(sums, len(own)))
            if held or ranks[-1]:
                averager.fill(ranks)
                averager.wait()
    else:
        for averager in averagers:
            averager.wait()
    if not lacks:
        hvd.synchronize(handle)


def _no_rows(parameter: nn.Parameter) -> Tensor:
    """Return a sparse gradient of an embedding's weight, without rows."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(rows, values, parameter.shape)


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

    A rank without a gradient for a parameter has no update. If no rank has one, nothing is sent.

    Horovod's own optimizer for Adasum does the same, but here the optimizer stays as it is. Source:
    Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2021 (arXiv 2006.02924),
    and _DistributedAdasumOptimizer in horovod/torch/optimizer.py, Horovod 0.28.1.

    Args:
        hvd: `horovod.torch`.
        optimizer: optimizer whose parameters change.
        step: function that takes the optimizer step.
        compressor: compressor from `compression`, for the updates that are sent.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [None if p.grad is None else p.detach().clone() for p in parameters]
    has = [old is not None for old in before]
    own = torch.tensor(has, dtype=torch.float32, device=parameters[0].device)
    shares = hvd.allreduce_async_(own, name="adasum.shares", op=hvd.Sum)
    step(optimizer)
    sent = []
    # By the position among all parameters, as each rank may have gradients for others.
    for number, share in enumerate(hvd.synchronize(shares).tolist()):
        if share:
            parameter, old = parameters[number].detach(), before[number]
            # A rank without a gradient has not changed it.
            update = torch.zeros_like(parameter) if old is None else parameter - old
            data, context = compressor.compress(update)
            handle = hvd.allreduce_async_(data, name=f"adasum.{number}", op=hvd.Adasum)
            sent.append((parameter, parameter if old is None else old, handle, context))
    for parameter, old, handle, context in sent:
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
