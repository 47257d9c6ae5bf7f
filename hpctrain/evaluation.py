"""Exact numbers over uneven shards."""

from typing import Any

import torch

from hpctrain.backends.base import Backend

__all__ = ["total"]


def total(backend: Backend, *values: Any) -> tuple[float, ...]:
    """Each value summed over all ranks.

    Whole numbers are summed as int64 and stay whole, others as float64; the ranks may have seen
    different numbers of samples, and each calls this once, with values of the same kinds.

    Args:
        backend: of the session.
        values: Python numbers, or tensors of one element on any device.

    Returns:
        Python numbers, the same on all ranks, in the order of the values.
    """
    # A Python float is a float64; torch would make it a float32.
    tensors = [
        torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None).detach()
        for value in values
    ]
    whole = [not (t.is_floating_point() or t.is_complex()) for t in tensors]
    sums: list[float] = [0.0] * len(tensors)
    for kind, dtype in ((True, torch.int64), (False, torch.float64)):
        places = [place for place, is_whole in enumerate(whole) if is_whole is kind]
        if places:
            flat = [tensors[place].reshape(()).to(backend.device, dtype) for place in places]
            for place, number in zip(places, backend.sum(torch.stack(flat)).tolist(), strict=True):
                sums[place] = number
    return tuple(sums)
