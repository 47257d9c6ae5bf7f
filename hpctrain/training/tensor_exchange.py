"""Tensors of all ranks: reduced, or gathered as bytes, by the few primitives of a backend."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hpctrain.backends.base import Backend

__all__ = ["all_rows", "as_bytes", "exchange", "joined", "reduced"]


def all_rows(backend: Backend, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the rows of all ranks; the gradient of a row is the sum over the ranks.

    Args:
        backend: backend of the ranks.
        rows: rows of this rank.
        lengths: number of rows of each rank.
    """
    gathered: Tensor = _AllRows.apply(rows, backend, lengths)  # type: ignore[no-untyped-call]
    return gathered


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, backend: Backend, lengths: Sequence[int]) -> Tensor:
        ctx.backend, ctx.lengths = backend, lengths
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        counts = [length * row_bytes for length in lengths]
        return joined(exchange(backend, as_bytes(rows), counts), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = reduced(ctx.backend, gradient, "sum")
        own: Tensor = torch.split(total, ctx.lengths)[ctx.backend.rank]
        return own, None, None


def reduced(backend: Backend, tensor: Tensor, op: str) -> Tensor:
    """Return the result of `Collectives.all_reduce`, without its checks."""
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        return torch.view_as_complex(reduced(backend, parts, op))
    floating, dtype = tensor.is_floating_point(), tensor.dtype
    # The types that every backend reduces: Horovod has no bfloat16, gloo no int16 and no bool.
    wide = torch.int64 if not floating else torch.promote_types(dtype, torch.float32)
    new = torch.empty(tensor.shape, dtype=wide, device=backend.device).copy_(tensor.detach())
    if not new.numel():
        pass
    elif op == "max":
        new = _greatest(backend, new)
    elif op == "min":
        new = -_greatest(backend, -new) if floating else ~_greatest(backend, ~new)
    else:
        new = backend.sum(new)
        if op == "mean":
            new /= backend.world_size
        elif not floating:
            dtype = torch.int64
    return new.to(tensor.device, dtype)


def _greatest(backend: Backend, tensor: Tensor) -> Tensor:
    """Return the maximum of each element over the ranks; NaN if it is NaN on a rank.

    gloo's comparison with NaN can lose NaN and the values of other ranks.
    """
    if not tensor.is_floating_point():
        return backend.max(tensor)
    missing = tensor.isnan()
    both = torch.stack([tensor.masked_fill(missing, -math.inf), missing.to(tensor.dtype)])
    values, missing = torch.unbind(backend.max(both))
    return values.masked_fill(missing > 0, math.nan)


def exchange(backend: Backend, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the bytes of all ranks, on the device.

    Args:
        backend: backend of the ranks.
        own: bytes of this rank, of shape (counts[rank],).
        counts: number of bytes of each rank.
    """
    padded = pad(own.to(backend.device), (0, max(counts) - len(own)))
    gathered = backend.all_gather(padded) if len(padded) else padded.expand(len(counts), 0)
    return [row[:count] for row, count in zip(gathered, counts, strict=True)]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as bytes, of shape (bytes,); every backend can send these."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def joined(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return parts, given as bytes, as one tensor of the type, rows and device of another one."""
    values = torch.cat(list(parts)).view(rows.dtype)
    whole: Tensor = values.reshape(-1, *rows.shape[1:]).to(rows.device)
    return whole
