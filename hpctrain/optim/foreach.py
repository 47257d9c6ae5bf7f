"""Lists of tensors for torch's foreach functions, and their precision."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["at_least_fp32", "grouped"]


def grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors into lists of one class, device and dtype each, in order.

    `torch._foreach_*` uses one kernel for such a list, and one per tensor for mixed lists.
    """
    lists: dict[tuple[type[Tensor], torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kind = Tensor if type(tensor) is nn.Parameter else type(tensor)
        lists.setdefault((kind, tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for fp16 and bf16, which lose small changes of large numbers; else the dtype."""
    return torch.promote_types(dtype, torch.float32)
