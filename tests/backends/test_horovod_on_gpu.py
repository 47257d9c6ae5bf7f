"""Horovod over NCCL, with ranks that share one GPU."""

import importlib.util
from functools import partial

import battery
import pytest
import ranks
import test_backends
import torch
from test_nccl import backend_and_device, prepared_state


@pytest.fixture
def horovod_on_gpu(nccl, lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build --cuda")
    return partial(nccl, env={**nccl.keywords["env"], "TEST_BACKEND": "horovod"})


def test_horovod_on_one_gpu_uses_nccl(horovod_on_gpu):
    expected = [("horovod", "nccl", "cuda:0")] * 3
    assert ranks.values(horovod_on_gpu(3, backend_and_device)) == expected


@pytest.mark.parametrize("size", [1, 3])
def test_sums_over_horovods_nccl_are_exact_and_equal_on_all_ranks(horovod_on_gpu, size):
    test_backends.test_sums_are_exact_and_equal_on_all_ranks(horovod_on_gpu, size)


def test_prepare_broadcasts_weights_of_rank_0_over_horovods_nccl(horovod_on_gpu):
    results = ranks.values(horovod_on_gpu(3, prepared_state))
    torch.manual_seed(0)
    for name, tensor in battery.small_model().state_dict().items():
        assert all(torch.equal(result[name], tensor) for result in results), name


def test_same_losses_over_horovods_nccl_for_every_world_size(horovod_on_gpu, tmp_path, monkeypatch):
    test_backends.test_same_losses_and_weights_for_every_world_size(
        horovod_on_gpu, tmp_path, monkeypatch, (1, 2, 3)
    )


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_over_horovods_nccl_trains_with_equal_weights(
    horovod_on_gpu, precision, clip
):
    test_backends.test_every_precision_trains_with_equal_weights_on_all_ranks(
        horovod_on_gpu, precision, clip
    )


def test_second_session_over_horovods_nccl(horovod_on_gpu):
    test_backends.test_second_session_in_one_process_works_and_restores_environment(horovod_on_gpu)
