"""Batch norm over the micro-batches of all ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["SyncBatchNorm", "convert"]


def convert(model: nn.Module, backend: Backend) -> nn.Module:
    """Convert a model's batch norm to use the micro-batches of all ranks, in place.

    On GPUs with ddp the layers become torch's own SyncBatchNorm, else the class below, also if they
    were torch's, which does not run on CPUs. Weights, buffers, hooks and names stay. A single rank
    has nothing to sum, so its model stays unchanged, except torch's layers on a CPU.

    Args:
        model: model on its device, before the backend wraps it.
        backend: backend of the session.

    Returns:
        The same model.

    Raises:
        UsageError: a layer has its own forward() or no weights yet; or the backend has several GPUs
            and no sums over them.
    """
    if backend.name == "dataparallel" and torch.cuda.device_count() > 1:
        raise UsageError("HT408.dataparallel")
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if backend.world_size == 1:
        for _, layer in layers:
            if isinstance(layer, nn.SyncBatchNorm) and backend.device.type == "cpu":
                layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
        return model
    for name, layer in layers:
        _refuse(name or "the model", layer)
    for _, layer in layers:
        # Change the object's class, as torch's lazy modules do: references to the layer, from a
        # hook, an optimizer or a second place in the model, stay valid.
        if backend.transport == "nccl" and backend.name == "ddp":
            layer.__class__ = nn.SyncBatchNorm
            layer.process_group = None  # type: ignore[assignment]
        else:
            layer.__class__ = SyncBatchNorm
            layer.ranks = _SharedBackend(backend)  # type: ignore[assignment]
    if layers:
        plural = "s" if len(layers) > 1 else ""
        logger.info("batch norm over all ranks: %d layer%s", len(layers), plural)
    return model


def _refuse(name: str, layer: _BatchNorm) -> None:
    if any(is_lazy(tensor) for tensor in [*layer.parameters(), *layer.buffers()]):
        raise UsageError("HT408.lazy-layer", layer=name)
    if type(layer).forward not in _FORWARDS:
        raise UsageError("HT408.custom-forward", layer=name, layer_class=type(layer).__name__)


class _SharedBackend:
    """Holder of the backend, which copies of the model share and pickles do not contain."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SharedBackend":
        return self

    def __reduce__(self) -> tuple[type["_SharedBackend"], tuple[()]]:
        return _SharedBackend, ()


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance, in training, are over all ranks.

    Inputs have the shape (batch, channels, ...) and any floating type. The number of samples may
    differ between ranks, and may be 0. Sums are sent as float64, in one call in the forward pass
    and one in the backward pass. Otherwise, and without a backend, it equals torch's BatchNorm.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015 (arXiv 1502.03167).
    """

    ranks = _SharedBackend()

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of two dimensions or more, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its own type.

        Raises:
            ValueError: all ranks together have a single value per channel, in training.
        """
        if not self.training or self.ranks.backend is None:
            return super().forward(input)
        self._check_input_dim(input)
        moments = self.ranks.backend.sum(_moments(input.detach()))
        total, squares, count = (*moments[:-1].chunk(2), moments[-1])
        # Read the count only if all ranks may have one value, because the read may wait for a GPU.
        if input.numel() <= input.size(1) and count <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got "
                f"{int(count)} over all ranks for inputs such as {tuple(input.shape)}"
            )
        mean = total / count
        variance = (squares / count - mean.square()).clamp_(min=0)
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        output: Tensor = _Normalize.apply(
            input, self.weight, self.bias, mean, variance, count, self.eps, self.ranks.backend
        )
        return output

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics."""
        if self.running_mean is None or self.running_var is None:
            return
        part = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if part is None:
                part = 1.0 / float(self.num_batches_tracked)
        with torch.no_grad():
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                running.lerp_(new.to(running.dtype), part or 0.0)


def _moments(x: Tensor) -> Tensor:
    """Return sum and sum of squares per channel, and the count, of shape (2 · channels + 1,).

    They are computed from the mean and the deviations from it, so squares of a large mean cancel
    in float64 only.
    """
    count = x.numel() // max(x.size(1), 1)
    if count == 0:
        return torch.zeros(2 * x.size(1) + 1, dtype=torch.float64, device=x.device)
    x, over = x.to(_at_least_fp32(x.dtype)), _all_but_channels(x)
    mean = x.mean(over, keepdim=True)
    deviations = (x - mean).square().sum(over).double()
    mean = mean.flatten().double()
    return torch.cat((mean * count, deviations + mean.square() * count, mean.new_full((1,), count)))


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) · weight + bias, with mean and variance of all ranks.

    Let h = (x - mean) / sqrt(variance + eps), g the gradient of the output times weight, and N
    the number of values of a channel on all ranks. Mean and variance depend on every x, by 1/N and
    2 (x - mean)/N, so dx = (g - sum(g)/N - h · sum(g · h)/N) / sqrt(variance + eps), with sums over
    all ranks. The gradients of weight and bias are those of this rank; the backend averages them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        backend: Backend,
    ) -> Tensor:
        """Return the output, with the type and the layout of x."""
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.backend = eps, backend
        return _affine(x, mean, variance, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, mean, variance, count = ctx.saved_tensors
        wide, over = _at_least_fp32(x.dtype), _all_but_channels(x)
        gradient = gradient.to(wide)
        normal = _affine(x.to(wide), mean, variance, None, None, ctx.eps)
        sums = torch.cat((gradient.sum(over), (gradient * normal).sum(over))).double()
        own_bias, own_weight = sums.clone().chunk(2)
        by_x = None
        if ctx.needs_input_grad[0]:
            shift, slope = (ctx.backend.sum(sums) / count).chunk(2)
            scale = (variance + ctx.eps).rsqrt()
            if weight is not None:
                scale = scale * weight.double()
            shape = [1, -1] + [1] * (x.dim() - 2)
            shift, slope, scale = (v.to(wide).view(shape) for v in (shift, slope, scale))
            by_x = torch.addcmul(gradient - shift, normal, slope, value=-1).mul_(scale).to(x.dtype)
        by_weight = own_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        by_bias = own_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return by_x, by_weight, by_bias, None, None, None, None, None


def _affine(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Apply torch's batch norm with a given mean and variance."""
    wide = _at_least_fp32(x.dtype)
    return functional.batch_norm(
        x,
        mean.to(wide),
        variance.to(wide),
        None if weight is None else weight.to(wide),
        None if bias is None else bias.to(wide),
        training=False,
        eps=eps,
    )


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for fp16 and bf16, which lose small changes of large numbers; else the dtype."""
    return torch.promote_types(dtype, torch.float32)
