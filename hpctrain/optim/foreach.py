"""Lists of tensors that torch works through in one go, and the precision in which it does."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["at_least_fp32", "grouped"]


def grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists of one device and dtype each, in their order.

    `torch._foreach_*` has one kernel for such a list, and goes tensor by tensor through others.
    """
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32 for fp16 and bf16, which lose small changes of large numbers; others as they are."""
    return torch.promote_types(dtype, torch.float32)
