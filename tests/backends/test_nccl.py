"""Several ranks over NCCL: on one GPU that they share, and on a GPU for each."""

import copy

import battery
import pytest
import ranks
import test_backends
import test_ddp_options
import test_precisions
import torch
from battery import session
from on_gpu import visible
from test_sync_batchnorm import PARTS, check_training, largest_difference, own_part
from torch import nn

from hpctrain.cluster.visible_gpus import CUDA
from hpctrain.errors import HpctrainError
from hpctrain.training import sync_batchnorm


def test_ranks_that_share_a_gpu_are_refused(gpu):
    results = gpu(3, battery.identity, env={CUDA: visible()[0]})
    for result in results:
        assert isinstance(result, HpctrainError), result
        assert result.exit_code == 2
        assert "is shared by ranks 0-2" in str(result)


def backend_and_device():
    with session(batch_size=2) as opened:
        return opened.backend.name, opened.backend.transport, str(opened.device)


def test_ranks_on_one_gpu_use_nccl(nccl):
    assert ranks.values(nccl(3, backend_and_device)) == [("ddp", "nccl", "cuda:0")] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_nccl_are_exact_and_equal_on_all_ranks(nccl, size):
    test_backends.test_sums_are_exact_and_equal_on_all_ranks(nccl, size)


def prepared_state():
    """Prepare other weights and buffers on each rank; return them as prepared."""
    with session(batch_size=2, precision="fp32") as opened:
        torch.manual_seed(opened.world.rank)
        model = opened.prepare(battery.small_model())
        return dict(model.state_dict())


def test_prepare_broadcasts_weights_of_rank_0_over_nccl(nccl):
    results = ranks.values(nccl(3, prepared_state))
    torch.manual_seed(0)
    for name, tensor in battery.small_model().state_dict().items():
        assert all(torch.equal(result[name], tensor) for result in results), name


def test_same_losses_over_nccl_for_every_world_size(nccl, tmp_path, monkeypatch):
    test_backends.test_same_losses_and_weights_for_every_world_size(
        nccl, tmp_path, monkeypatch, (1, 2, 3)
    )


def test_same_losses_over_nccl_with_a_gpu_for_each_rank(gpu, lacking, tmp_path, monkeypatch):
    if len(visible()) < 2:
        lacking("two-gpus", "ranks with a GPU for each")
    # Twelve micro-batches are shared evenly by these.
    sizes = [size for size in (1, 2, 3, 4) if size <= len(visible())]
    test_backends.test_same_losses_and_weights_for_every_world_size(
        gpu, tmp_path, monkeypatch, sizes
    )


def test_deterministic_dropout_over_nccl_is_equal_for_every_world_size(nccl, tmp_path, monkeypatch):
    test_backends.test_deterministic_dropout_is_equal_for_every_world_size(
        nccl, tmp_path, monkeypatch, (1, 3)
    )


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_over_nccl_trains_with_equal_weights_on_all_ranks(nccl, precision, clip):
    test_backends.test_every_precision_trains_with_equal_weights_on_all_ranks(nccl, precision, clip)


@pytest.mark.parametrize("name", ["fp16", "O2"])
def test_overflow_on_one_rank_over_nccl_is_skipped_by_all(nccl, name):
    test_precisions.test_overflow_on_one_rank_is_skipped_by_all(nccl, name)


def test_bucket_size_and_static_graph_over_nccl_change_only_the_order_of_sums(nccl):
    test_ddp_options.check_order_of_sums(nccl)


def test_ddp_compression_over_nccl_is_equal_on_all_ranks_and_repeatable(nccl):
    test_ddp_options.check_compression(nccl)


def test_second_session_over_nccl(nccl):
    test_backends.test_second_session_in_one_process_works_and_restores_environment(nccl)


def compare_with_torch(dtype):
    """Return differences from torch's layer: outputs, gradients and running statistics."""
    with session(batch_size=2, precision="fp32") as opened:
        rank, device = opened.world.rank, opened.device
        torch.manual_seed(1)
        batch = torch.randn(sum(PARTS), 4, 5, 6, dtype=dtype) * 3 + 5
        slope = torch.randn_like(batch)
        plain = nn.BatchNorm2d(4, dtype=dtype)
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
        torch_layer = sync_batchnorm.convert(plain.to(device), opened.backend)
        assert type(torch_layer) is nn.SyncBatchNorm
        own_layer = copy.deepcopy(torch_layer)
        own_layer.__class__ = sync_batchnorm.SyncBatchNorm
        own_layer.ranks = sync_batchnorm._SharedBackend(opened.backend)
        found = []
        for layer in (torch_layer, own_layer):
            x = own_part(batch, rank).to(device).requires_grad_()
            y = layer(x)
            (y * own_part(slope, rank).to(device)).sum().backward()
            gradients = [parameter.grad for parameter in layer.parameters()]
            found.append([y, x.grad, *gradients, layer.running_mean, layer.running_var])
        return [largest_difference(own, other) for own, other in zip(*found, strict=True)]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_sync_batchnorm_equals_torchs_over_nccl(nccl, dtype, error):
    for found in ranks.values(nccl(len(PARTS), compare_with_torch, dtype)):
        assert len(found) == 6
        assert max(found) < error


def test_training_with_torchs_sync_batchnorm_over_nccl_equals_one_process(
    nccl, tmp_path, monkeypatch
):
    check_training(nccl, tmp_path, monkeypatch, 1e-7)
