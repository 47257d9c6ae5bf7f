"""Exact numbers over uneven shards."""

from typing import Any

import torch

from hpctrain.backends.base import Backend

__all__ = ["total"]


def total(backend: Backend, *values: Any) -> tuple[float, ...]:
    """Each value summed over all ranks.

    Whole numbers are summed as int64 and stay whole, others as float64; the ranks may have seen
    different numbers of samples, and each calls this once, with as many values.

    Args:
        backend: of the session.
        values: Python numbers, or tensors of one element on any device.

    Returns:
        Python numbers, the same on all ranks, in the order of the values.
    """
    whole = torch.zeros(2, len(values), dtype=torch.int64)  # sums, and how many are not whole
    parts = torch.zeros(len(values), dtype=torch.float64)
    for place, value in enumerate(values):
        number = value.item() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int):
            whole[0, place] = number
        else:
            whole[1, place], parts[place] = 1, number
    # Always two sums of the same lengths: a rank without samples brings 0 for another's 0.5.
    sums, fractional = backend.sum(whole.to(backend.device)).tolist()
    rest = backend.sum(parts.to(backend.device)).tolist()
    return tuple(n + r if f else n for n, f, r in zip(sums, fractional, rest, strict=True))
