"""Options of a training: accumulation, clipping, memory formats; what prepare() leaves alone."""

import random

import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, fit, images, session, small_model, train
from torch import nn
from torch.utils.data import Dataset

import hpctrain
from hpctrain.rundir import RunDirectory


def plain_model():
    """Return a model without batch norm, so that a micro-batch may have any size."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def train_plain(options, data=None, before=lambda model: None, **loading):
    """Train; return rows of metrics, and the weights at the end."""
    with session(**{"log_every": 1, "run_dir": "run", "precision": "fp64", **options}) as opened:
        model = plain_model()
        before(model)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05, 0.9))
        fit(opened, model, opened.loader(data or images(240), **loading))
        rows = RunDirectory("run").rows() if opened.is_main else []
        return rows, [p.detach().clone() for p in model.parameters()]


def in_folders(run, tmp_path, monkeypatch, function, *cases):
    """Run each case (ranks, arguments) in its own folder; return the results of rank 0."""
    results = []
    for number, (size, *arguments) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        results.append(ranks.values(run(size, function, *arguments))[0])
    return results


def train_steps_of_12(batch_size):
    return train_plain({"global_batch": 12, "batch_size": batch_size, "max_steps": 6})


def test_accumulated_micro_batches_equal_one_large_batch(tmp_path, monkeypatch):
    cases = [(1, 12), (1, 4), (1, 1), (3, 2)]
    (rows, weights), *others = in_folders(
        ranks.run, tmp_path, monkeypatch, train_steps_of_12, *cases
    )
    for other_rows, other_weights in others:
        losses = [row["loss"] for row in rows]
        assert [row["loss"] for row in other_rows] == pytest.approx(losses, rel=1e-12)
        for weight, other_weight in zip(weights, other_weights, strict=True):
            assert torch.allclose(weight, other_weight, rtol=1e-12, atol=1e-14)


def train_uneven_epochs(batch_size):
    """Train two epochs of 12 + 12 + 7 samples."""
    options = {"global_batch": 12, "batch_size": batch_size, "epochs": 2}
    return train_plain(options, images(31), drop_last=False)


def train_uneven_baseline():
    """Take the same steps, each with one batch."""
    with session(batch_size=1) as opened:
        order = hpctrain.data.TrainingSampler
        torch.manual_seed(0)
        model = plain_model().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        pictures, losses = images(31), []
        for epoch in range(2):
            sampler = order(31, hpctrain.arguments.Batches(1, 1, 1), opened.world, 0)
            sampler.epoch = epoch
            indices = [index for (index,) in sampler]
            for start in (0, 12, 24):
                batch = pictures.__getitems__(indices[start : start + 12])
                pixels = torch.stack([pixel for pixel, _ in batch]).double()
                loss = nn.functional.cross_entropy(
                    model(pixels), torch.stack([target for _, target in batch])
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, [p.detach() for p in model.parameters()]


@HOROVOD_SLOW
def test_uneven_last_step_counts_each_sample_once(run, tmp_path, monkeypatch):
    """Use 12 + 12 + 7 samples in micro-batches of 3: the last step has 3 + 3 + 1, one rank none."""
    expected, weights = ranks.values(ranks.run(1, train_uneven_baseline))[0]
    found = in_folders(
        run, tmp_path, monkeypatch, train_uneven_epochs, (1, 3), (2, 3), (4, 3), (1, 12)
    )
    for rows, weights_found in found:
        assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-12)
        for weight, expected_weight in zip(weights_found, weights, strict=True):
            assert torch.allclose(weight, expected_weight, rtol=1e-12, atol=1e-14)


class Jittered(Dataset):
    """Images that are augmented one by one with random numbers of all generators."""

    def __init__(self, count):
        self.images = images(count)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        pixels, target = self.images[index]
        return pixels * (1 + torch.rand(())) + random.random(), target


def train_augmented(workers):
    options = {"global_batch": 12, "batch_size": 2, "max_steps": 8, "workers": workers}
    first = []

    def copy(model):
        first.extend(p.detach().clone() for p in model.parameters())

    rows, _ = train_plain(options, Jittered(60), copy)
    return [row["loss"] for row in rows], first


@HOROVOD_SLOW
def test_seed_gives_the_same_weights_and_augmentation_in_every_world(run, tmp_path, monkeypatch):
    (losses, first), *others = in_folders(
        run, tmp_path, monkeypatch, train_augmented, (1, 0), (3, 0), (2, 1)
    )
    assert len(set(losses)) == 8
    for other_losses, other_first in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other_first, strict=True))
        assert other_losses == pytest.approx(losses, rel=1e-12)


def clipped_step(options):
    with session(batch_size=4, **options) as opened:
        model = plain_model()
        before = [p.detach().clone() for p in model.parameters()]
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for batch, targets in list(opened.loader(images(240)))[: opened.batches.accumulate]:
            with opened.autocast():
                loss = nn.functional.cross_entropy(model(batch) * 100, targets)
            opened.step(loss)
        moved = [
            (a - b).detach().flatten() for a, b in zip(model.parameters(), before, strict=True)
        ]
        return torch.cat(moved)


@pytest.mark.parametrize(("precision", "accumulate"), [("fp64", 1), ("fp16", 3), ("O2", 3)])
@HOROVOD_SLOW
def test_clipping_applies_to_averaged_unscaled_gradients(run, precision, accumulate):
    scale = {} if precision == "fp64" else {"loss_scale": 8.0}
    options = {"precision": precision, "accumulate": accumulate, **scale}
    close = {"rel": 1e-2 if precision == "O2" else 1e-4}  # half weights round the change
    for moved in ranks.values(run(3, clipped_step, {**options, "clip_value": 0.25})):
        assert moved.abs().max().item() == pytest.approx(0.25, **close)
    for moved in ranks.values(
        run(3, clipped_step, {**options, "clip_value": 0.25, "clip_norm": 0.125})
    ):
        assert moved.double().norm().item() == pytest.approx(0.125, **close)


def prepared_groups():
    """Return the settings of an optimizer's groups before and after prepare()."""
    with session(global_batch=12) as opened:
        model = small_model()
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "lr": 0.3}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.05)
        before = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        opened.prepare(model, optimizer)
        return before, [
            {**group, "params": len(group["params"])} for group in optimizer.param_groups
        ]


@HOROVOD_SLOW
def test_prepare_leaves_the_rates_and_groups_of_an_optimizer_as_they_are(run):
    for before, after in ranks.values(run(3, prepared_groups)):
        assert after == before


def formats(channels_last, **options):
    """Return whether batches, and weights before and after a step, have channels last."""
    with session(batch_size=4, channels_last=channels_last, **options) as opened:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 10))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        pictures = [(torch.rand(3, 8, 8), 1) for _ in range(24)]
        batch, targets = next(iter(opened.loader(pictures)))
        weight = model.get_submodule("0").weight
        before = weight.stride()
        with opened.autocast():
            loss = nn.functional.cross_entropy(model(batch), targets)
        opened.step(loss)
        assert weight.stride() == before
        return tuple(t.is_contiguous(memory_format=torch.channels_last) for t in (batch, weight))


@HOROVOD_SLOW
def test_channels_last_only_where_asked_for_on_cpu(run):
    assert ranks.values(run(3, formats, True)) == [(True, True)] * 3
    assert ranks.values(run(3, formats, None)) == [(False, False)] * 3


def train_compiled(compile):
    options = {"batch_size": 8, "max_steps": 4, "compile": compile, "run_dir": str(compile)}
    with session(precision="fp32", log_every=1, **options) as opened:
        losses, model = train(opened, 4, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        compiling = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return list(model.state_dict()), compiling, losses


@pytest.mark.slow
def test_compiled_model_trains_and_keeps_its_names():
    names, graphs, losses = ranks.values(ranks.run(1, train_compiled, True, timeout=120))[0]
    plain, none, expected = ranks.values(ranks.run(1, train_compiled, False))[0]
    assert names == plain == ["1.weight", "1.bias"]
    assert (graphs > 0, none) == (True, 0)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (error,) = ranks.run(1, train_compiled, True, env={"PATH": "/nowhere"})
    assert isinstance(error, hpctrain.errors.UsageError)
    assert "no g++ and no clang++" in error.found


def open_wrong_loader(options):
    with session(batch_size=4) as opened:
        opened.loader(images(24), **options)


@pytest.mark.parametrize("drop_last", [True, False])
def test_drop_last_for_an_evaluation_is_refused(drop_last):
    (error,) = ranks.run(1, open_wrong_loader, {"train": False, "drop_last": drop_last})
    assert "drop_last=…) for an evaluation" in error.found


class WrappedLoader:
    """A wrapper of a loader, as of a progress bar."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        yield from self.loader


def sample_orders(wrap):
    with session(batch_size=4, epochs=3, run_dir=f"run-{wrap}") as opened:
        opened.prepare(plain_model())
        loader = opened.loader(images(24))
        seen = []
        with opened.run() as run:
            for _ in run.epochs():
                batches = run.batches(WrappedLoader(loader) if wrap else loader)
                seen.append([targets.tolist() for _, targets in batches])
        return seen


def test_wrapped_loader_shuffles_each_epoch():
    (plain,) = ranks.values(ranks.run(1, sample_orders, False))
    (wrapped,) = ranks.values(ranks.run(1, sample_orders, True))
    assert wrapped == plain
    assert len({str(epoch) for epoch in plain}) == 3


def misuse_optimizer(how):
    with session(batch_size=4) as opened:
        model = plain_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
        if how == "closure":
            optimizer = torch.optim.LBFGS(model.parameters())
        if how == "unknown parameter":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        model = opened.prepare(model)
        if how not in ("unprepared", "nothing"):
            optimizer = opened.prepare(optimizer)
        loss = model(torch.ones(4, 1, 8, 8)).sum()
        opened.step(loss, *([optimizer] if how == "unprepared" else []))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown parameter", "parameters of the SGD that are in no prepared model: 1"),
        ("closure", "LBFGS, which computes the loss several times with a closure"),
        ("unprepared", "an optimizer that was not prepared"),
        ("nothing", "no optimizer was prepared"),
    ],
)
def test_misused_optimizers_are_refused(how, message):
    (error,) = ranks.run(1, misuse_optimizer, how)
    assert isinstance(error, hpctrain.errors.UsageError), error
    assert message in error.found


def forward_3d():
    with session(batch_size=2, channels_last=True) as opened:
        return opened.prepare(nn.Conv3d(1, 2, 3))(torch.ones(1, 1, 4, 4, 4)).shape


def test_channels_last_leaves_3d_models_alone():
    assert ranks.values(ranks.run(1, forward_3d)) == [torch.Size([1, 2, 2, 2, 2])]


def open_iterable_dataset():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

    with session(batch_size=2) as opened:
        opened.loader(Stream())


def test_iterable_dataset_is_refused():
    (error,) = ranks.run(1, open_iterable_dataset)
    assert isinstance(error, hpctrain.errors.UsageError)
    assert "a Stream, which has no length" in error.found
    assert "run.batches(loader)" in error.fixes[0]
