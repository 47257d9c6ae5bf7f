"""Batch norm over all ranks equals that of one process with the whole batch."""

import copy
import pickle

import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, by_world_size, session, train
from torch import nn

import hpctrain
from hpctrain.training import sync_batchnorm

PARTS = [3, 5, 8]  # samples of each rank


def own_part(batch, rank):
    return batch.split(PARTS)[rank].detach().clone()


def largest_difference(found, expected):
    """Return the largest difference, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def plain_and_synced(layer, opened):
    """Return a layer of one process, and the same layer over all ranks."""
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return copy.deepcopy(layer), sync_batchnorm.convert(layer, opened.backend)


KINDS = [
    (nn.BatchNorm1d, (), {}),
    (nn.BatchNorm1d, (5,), {}),
    (nn.BatchNorm2d, (5, 6), {}),
    (nn.BatchNorm3d, (3, 4, 5), {}),
    (nn.BatchNorm2d, (5, 6), {"momentum": None}),
    (nn.BatchNorm2d, (5, 6), {"affine": False}),
    (nn.BatchNorm2d, (5, 6), {"track_running_stats": False}),
    (nn.SyncBatchNorm, (5, 6), {}),
]


def compare_with_one_process():
    """Return differences from one process: outputs, gradients and running statistics by kind."""
    found = []
    with session(batch_size=2) as opened:
        rank = opened.world.rank
        for kind, shape, more in KINDS:
            torch.manual_seed(1)
            plain, synced = plain_and_synced(kind(4, **more).double(), opened)
            if kind is nn.SyncBatchNorm:
                plain.__class__ = nn.BatchNorm2d  # torch's layer refuses the CPU
            for step in range(3):
                batch = torch.randn(sum(PARTS), 4, *shape, dtype=torch.float64) * 3 + 50 + step
                slope = torch.randn_like(batch)
                x = own_part(batch, rank).requires_grad_()
                y = synced(x)
                (y * own_part(slope, rank)).sum().backward()
                expected = plain(batch.requires_grad_())
                (expected * slope).sum().backward()
                found.append(largest_difference(y, own_part(expected, rank)))
                found.append(largest_difference(x.grad, own_part(batch.grad, rank)))
            for own, other in zip(synced.parameters(), plain.parameters(), strict=True):
                found.append(largest_difference(opened.backend.sum(own.grad.clone()), other.grad))
            for own, other in zip(synced.buffers(), plain.buffers(), strict=True):
                found.append(largest_difference(own.double(), other.double()))
            synced.eval()
            plain.eval()
            found.append(largest_difference(synced(x), plain(x)))
    return found


def test_sync_batchnorm_equals_one_process_with_uneven_batches(run):
    for found in ranks.values(run(3, compare_with_one_process)):
        assert len(found) == 8 * 7 + 7 * 2 + 7 * 3
        assert max(found) < 1e-12


def compare_in_half_precision():
    """Return the types of the outputs, and their differences from one process in float64."""
    found = []
    with session(batch_size=2) as opened:
        rank = opened.world.rank
        for kind, weights in [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float32),
        ]:
            torch.manual_seed(1)
            batch = (torch.randn(sum(PARTS), 4, 5, 6) + 20).to(kind)
            slope = torch.randn_like(batch)
            plain, synced = plain_and_synced(nn.BatchNorm2d(4).to(weights), opened)
            x = own_part(batch, rank).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind is torch.bfloat16):
                y = synced(x)
            (y * own_part(slope, rank)).sum().backward()
            batch = batch.double().requires_grad_()
            expected = plain.double()(batch)
            (expected * slope.double()).sum().backward()
            found.append((y.dtype, largest_difference(y.double(), own_part(expected, rank))))
            found.append(
                (x.grad.dtype, largest_difference(x.grad.double(), own_part(batch.grad, rank)))
            )
    return found


@HOROVOD_SLOW
def test_sync_batchnorm_in_half_precision_keeps_dtype_and_accuracy(run):
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    for found in ranks.values(run(3, compare_in_half_precision)):
        kinds = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float16]
        assert [kind for kind, _ in found] == [kind for kind in kinds for _ in range(2)]
        for kind, error in found:
            assert error < rounding[kind]


def make_network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * 16, 10),
    )


def train_network():
    with session(
        global_batch=24,
        max_steps=20,
        precision="fp64",
        sync_batchnorm=True,
        log_every=1,
        run_dir="run",
    ) as opened:
        losses, model = train(opened, 20, make_network())
        return losses, dict(model.state_dict()), type(model.get_submodule("1")).__name__


def check_training(run, tmp_path, monkeypatch, error):
    """Train on one and on three ranks, compare within an error; return the three states."""
    found = by_world_size(run, (1, 3), train_network, tmp_path, monkeypatch)
    losses, state, kind = found[1][0]
    assert kind == "BatchNorm2d"  # a rank that is alone has nothing to sum
    assert len(losses) == 20
    assert found[3][0][0] == pytest.approx(losses, rel=error / 10)
    for _, other, kind in found[3]:
        assert kind == "SyncBatchNorm"
        assert list(other) == list(state)
        for name, tensor in other.items():
            assert largest_difference(tensor.double(), state[name].double()) < error, name
    return [other for _, other, _ in found[3]]


@HOROVOD_SLOW
def test_training_with_sync_batchnorm_equals_one_process(run, tmp_path, monkeypatch):
    first, *others = check_training(run, tmp_path, monkeypatch, 1e-9)
    for other in others:
        assert all(torch.equal(tensor, first[name]) for name, tensor in other.items())


def count_sums():
    with session(batch_size=2) as opened:
        backend, calls = opened.backend, []
        before = backend.sum
        backend.sum = lambda tensor: calls.append(tensor.dtype) or before(tensor)
        layer = sync_batchnorm.convert(nn.BatchNorm2d(4), backend)
        x = torch.randn(3, 4, 2, 2, requires_grad=True)
        y = layer(x)
        forward = len(calls)
        y.sum().backward()
        both = len(calls)
        layer.eval()(x)
        layer.train()(torch.randn(3, 4, 2, 2)).sum().backward()
        return forward, both, len(calls), set(calls)


@HOROVOD_SLOW
def test_sync_batchnorm_sums_once_per_pass_and_never_in_eval(run):
    for found in ranks.values(run(3, count_sums)):
        assert found == (1, 2, 3, {torch.float64})


LAYOUTS = ([1, 1, 1], [2, 0, 1], [0, 1, 0])  # samples of each rank


def normalise_few_samples():
    found = []
    with session(batch_size=2) as opened:
        rank = opened.world.rank
        layer = sync_batchnorm.convert(nn.BatchNorm1d(4), opened.backend)
        for samples in LAYOUTS:
            x = (torch.ones(samples[rank], 4) * rank).requires_grad_()
            try:
                y = layer(x)
            except ValueError as error:
                found.append(str(error))
                continue
            (y * y).sum().backward()
            found.append((y.detach(), x.grad.shape))
    return found


@HOROVOD_SLOW
def test_sync_batchnorm_with_one_sample_or_none_on_a_rank(run):
    results = ranks.values(run(3, normalise_few_samples))
    for layout, *found in zip(LAYOUTS[:2], *results, strict=False):
        assert [y.shape for y, _ in found] == [(count, 4) for count in layout]
        assert [shape for _, shape in found] == [(count, 4) for count in layout]
        y = torch.cat([y for y, _ in found])
        assert y.mean(0).abs().max() < 1e-6
        assert (y.square().mean(0) - 1).abs().max() < 1e-4
    for *_, refused in results:
        assert "more than 1 value per channel" in refused
        assert "got 1" in refused


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(4)
        self.first, self.second, self.layer = norm, norm, nn.LayerNorm(4)


def convert_shared_layer():
    with session(batch_size=2) as opened:
        model = Shared()
        state, called = list(model.state_dict()), []
        hook = model.first.register_forward_hook(lambda *_: called.append(1))
        layer = model.first
        before = list(model.parameters())
        converted = sync_batchnorm.convert(model, opened.backend)
        assert converted is model
        assert layer is model.first is model.second
        assert isinstance(layer, sync_batchnorm.SyncBatchNorm)
        assert isinstance(model.layer, nn.LayerNorm)
        assert list(model.state_dict()) == state
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        twin = copy.deepcopy(model)
        x = torch.randn(4, 4) + opened.world.rank**2
        y = layer(x)
        assert torch.equal(y, twin.first(x))
        assert called == [1, 1]
        hook.remove()
        # Loaded from a file, it is batch norm of one process.
        alone = pickle.loads(pickle.dumps(layer))
        local = alone(x)
        assert local.mean(0).abs().max() < 1e-6
        plain = nn.Linear(2, 2)
        assert sync_batchnorm.convert(plain, opened.backend) is plain
        return y.mean(0).abs().max().item()


@HOROVOD_SLOW
def test_sync_batchnorm_convert_keeps_names_hooks_and_copies(run):
    for result in ranks.values(run(3, convert_shared_layer)):
        assert result > 0.1  # it would be 0 for this rank alone


class OwnForward(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


class NcclBackend:
    """A fake backend; only its names are read."""

    name, transport, world_size = "ddp", "nccl", 2


def test_sync_batchnorm_convert_uses_torchs_layer_for_ddp_over_nccl():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x, state = torch.randn(8, 4), list(model.state_dict())
    expected = copy.deepcopy(model).eval()(x)
    converted = sync_batchnorm.convert(model, NcclBackend())
    assert type(converted[1]) is nn.SyncBatchNorm
    assert list(converted.state_dict()) == state
    assert torch.equal(converted.eval()(x), expected)
    assert converted.train()(x).shape == (8, 4)  # without a process group


def test_sync_batchnorm_refused_with_dataparallel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # a fake
    backend = NcclBackend()
    backend.name = "dataparallel"
    with pytest.raises(hpctrain.HpctrainError, match="--backend ddp") as refused:
        sync_batchnorm.convert(nn.BatchNorm1d(4), backend)
    assert refused.value.code == "HT408"


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (OwnForward(4), ["OwnForward", "forward()"]),
        (nn.LazyBatchNorm1d(), ["channels", "model(batch)"]),
    ],
)
def test_sync_batchnorm_refuses_layers_of_unknown_kind(layer, words):
    with pytest.raises(hpctrain.errors.UsageError) as refused:
        sync_batchnorm.convert(nn.ModuleDict({"norm": layer}), NcclBackend())
    for word in ["--sync-batchnorm", "norm", "HT408", *words]:
        assert word in str(refused.value)


def train_with_torchs_layers(synchronise):
    """Run a model with torch's layers, which without hpctrain would refuse the CPU."""
    with session(batch_size=4, precision="fp64") as opened:
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
        if synchronise:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = opened.prepare(model)
        generator = torch.Generator().manual_seed(1)
        batch = torch.rand(12, 5, generator=generator, dtype=torch.float64)
        size = 12 // opened.world.world_size
        return model(batch[opened.world.rank * size :][:size]).detach()


@HOROVOD_SLOW
def test_torchs_sync_batchnorm_layers_train_on_cpu(run):
    (expected,) = ranks.values(run(1, train_with_torchs_layers, False))
    (alone,) = ranks.values(run(1, train_with_torchs_layers, True))
    assert torch.equal(alone, expected)
    together = torch.cat(ranks.values(run(3, train_with_torchs_layers, True)))
    assert torch.allclose(together, expected, rtol=1e-12, atol=1e-14)
