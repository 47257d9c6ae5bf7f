"""Check of devices and communication at the start, by numbers that are known exactly."""

import torch

from hpctrain.backends.base import Backend
from hpctrain.errors import StartError
from hpctrain.rendezvous import Roster

__all__ = ["check"]

_SIDE = 256
# Weighted sum of the elements of the product below. All its numbers are whole and small, so it is
# exact in every order of summation, in float32 and in TF32.
_PRODUCT = 2201815


def check(backend: Backend, roster: Roster) -> None:
    """Compute a product of matrices on each rank, and a sum over all ranks.

    Args:
        backend: connected ranks.
        roster: their hosts.

    Raises:
        StartError: the device of a rank computes wrong numbers, or a rank gets a wrong sum; raised
            by all ranks.
    """
    count = torch.arange(_SIDE * _SIDE, device=backend.device).reshape(_SIDE, _SIDE)
    values = (count * 7 % 17 - 8).float()
    product = int(((values @ values.T).long() * (count % 1009)).sum())
    wrong = "" if product == _PRODUCT else str(product)
    row = values[0]
    if not torch.equal(backend.sum(row.clone()), row * backend.world_size):
        wrong = wrong or "sum"
    for rank, text in enumerate(backend.all_gather_text(wrong)):
        if text:
            key = "HT318.wrong-sum" if text == "sum" else "HT318.wrong-product"
            node = roster.host(rank)
            error = StartError(key, rank=rank, node=node, product=text, expected=_PRODUCT)
            error.reported_by_rank_0 = rank != backend.rank
            raise error
