"""Known numbers that each rank computes at the start."""

import os

import pytest
import ranks
import torch

import hpctrain
from hpctrain.training import known_numbers


def test_single_process_and_exact_numbers(monkeypatch):
    """Without an error in any session; here the number itself, in other types."""
    count = torch.arange(256 * 256).reshape(256, 256)
    values = count * 7 % 17 - 8
    for dtype in (torch.int64, torch.float64, torch.float32):
        product = (values.to(dtype) @ values.T.to(dtype)).long()
        assert int((product * (count % 1009)).sum()) == known_numbers._PRODUCT
    assert product.abs().max() < 2**13  # exact in float32 with any order of the sums
    with hpctrain.Session(backend="single", batch_size=1):
        pass


def opened(wrong):
    """Open a session on each rank; the device of rank 1 computes a wrong product, or sum."""
    rank = int(os.environ["HPCTRAIN_RANK"])
    if rank == 1 and wrong == "product":
        known_numbers._PRODUCT = 1
    if rank == 1 and wrong == "sum":
        torch.equal = lambda *tensors: False
    with hpctrain.Session(batch_size=1):
        return "open"


@pytest.mark.parametrize("wrong", ["product", "sum"])
def test_all_ranks_name_the_one_with_wrong_numbers(wrong):
    results = ranks.run(3, opened, wrong, layout=(1, 2))
    assert [error.code for error in results] == ["HT318"] * 3
    assert {error.found.partition(" on node2 ")[0] for error in results} == {"rank 1"}
    # It is the one that failed first, whose host is left out.
    assert [error.reported_by_rank_0 for error in results] == [True, False, True]
