"""Options of a training: accumulation, clipping, rates, decay, averages, memory formats."""

import json
import math
import random

import faults
import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, fit, images, session, small_model, train
from checkpoints import load_newest
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


def train_with_rates(options):
    options = {"batch_size": 4, "lr": 0.02, **options}
    return train_plain(options)[0], json.loads(RunDirectory("run").summary.read_text())[
        "learning_rate"
    ]


def test_lr_schedule_options_are_followed_and_logged(tmp_path, monkeypatch):
    """Train on three ranks, with twenty steps an epoch."""
    warm = {"lr_warmup_epochs": 0.25, "epochs": 2}
    cosine = {**warm, "lr_schedule": "cosine", "lr_scaling": "linear", "lr_reference_batch": 24}
    step = {"lr_schedule": "step", "lr_step_epochs": 1, "lr_step_factor": 0.5, "epochs": 3}
    polynomial = {"lr_schedule": "polynomial", "lr_power": 2.0, "max_steps": 25}
    found = in_folders(
        ranks.run, tmp_path, monkeypatch, train_with_rates, (3, cosine), (3, step), (3, polynomial)
    )
    rates = [[row["lr"] for row in rows] for rows, _ in found]
    half = 0.05 * 12 / 24  # of the optimizer's rate, not of --lr
    curve = [half * (1 + math.cos(math.pi * (s - 5) / 35)) / 2 for s in range(5, 40)]
    assert rates[0] == pytest.approx([half * (s + 1) / 5 for s in range(5)] + curve)
    assert rates[1] == pytest.approx([0.05] * 20 + [0.025] * 20 + [0.0125] * 20)
    assert rates[2] == pytest.approx([0.05 * (1 - s / 25) ** 2 for s in range(25)])
    assert [description for _, description in found] == [
        "warm-up 5 steps, cosine over 40 steps",
        "times 0.5 every 20 steps",
        "polynomial of power 2 over 25 steps",
    ]


def rates_with_resume(die_at, resume):
    options = {
        "batch_size": 4, "epochs": 2, "lr_warmup_epochs": 0.5, "lr_schedule": "cosine",
        "lr_scaling": "sqrt", "checkpoint_every": 7, "resume": resume,
    }  # fmt: skip

    def die(model):
        if die_at is not None:
            model.register_forward_pre_hook(raise_at_step(die_at))

    return [row["lr"] for row in train_plain(options, before=die)[0]]


def raise_at_step(step):
    seen = iter(range(step))

    def hook(*_):
        if next(seen, None) is None:
            raise RuntimeError("a planned error")

    return hook


def test_resumed_run_has_the_lr_schedule_of_an_uninterrupted_one(tmp_path, monkeypatch):
    (expected,) = in_folders(ranks.run, tmp_path, monkeypatch, rates_with_resume, (1, None, False))
    monkeypatch.chdir(tmp_path)
    (error,) = ranks.run(1, rates_with_resume, 70, False)
    assert "a planned error" in str(error)
    assert ranks.values(ranks.run(1, rates_with_resume, None, True)) == [expected]
    assert faults.started_at() == [0, 70]
    assert len(expected) == 120


def open_two_schedules():
    with session(batch_size=4, max_steps=2, lr_schedule="cosine") as opened:
        model = plain_model()
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with opened.run(state={"scheduler": scheduler}) as run:
            for _ in run.epochs():
                for _batch in run.batches(opened.loader(images(24))):
                    pass


def test_two_lr_schedules_are_refused():
    (error,) = ranks.run(1, open_two_schedules)
    assert isinstance(error, hpctrain.errors.UsageError)
    assert "a scheduler of the script's own" in error.found


def train_with_endless_loader(options):
    with session(batch_size=4, **options) as opened:
        model = plain_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with opened.run() as run:
            for _ in run.epochs():
                for _batch in run.batches(iter([1, 2])):
                    pass


@pytest.mark.parametrize(
    "options",
    [
        {"lr_schedule": "cosine", "epochs": 2},
        {"lr_warmup_epochs": 1.0, "epochs": 2},
        {"lr_schedule": "step", "max_steps": 2},
    ],
)
def test_lr_schedule_over_a_loader_without_length_is_refused(options):
    (error,) = ranks.run(1, train_with_endless_loader, options)
    assert isinstance(error, hpctrain.errors.UsageError)
    assert "over a loader without a length" in error.found
    assert ("--lr-warmup-steps N" in error.fixes) == ("lr_warmup_epochs" in options)


def rates_over_a_stream(options):
    """Return the rate of each step over a loader without a length, and the line in the summary."""
    with session(batch_size=4, run_dir="run", **options) as opened:
        model = nn.Linear(1, 1)
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        rates, rank = [], opened.world.rank
        with opened.run() as run:
            for _ in run.epochs():
                for points in run.batches(torch.full((4, 1), n + rank / 7) for n in range(9)):
                    rates.append(optimizer.param_groups[0]["lr"])
                    opened.step(model(points).mean())
    return rates, json.loads(RunDirectory("run").summary.read_text())["learning_rate"]


@HOROVOD_SLOW
def test_warmup_steps_and_least_rate_over_a_loader_without_length(run):
    options = {"lr_warmup_steps": 3, "lr_schedule": "cosine", "lr_min": 0.01, "max_steps": 9}
    warm = [0.1 * (s + 1) / 3 for s in range(3)]
    curve = [0.01 + 0.09 * (1 + math.cos(math.pi * s / 6)) / 2 for s in range(6)]
    for rates, line in ranks.values(run(3, rates_over_a_stream, options)):
        assert rates == pytest.approx(warm + curve, rel=1e-12)
        assert line == "warm-up 3 steps, cosine over 9 steps to 0.01"


def test_warmup_steps_need_no_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"lr_warmup_steps": 4, "epochs": 1}
    ((rates, _),) = ranks.values(ranks.run(1, rates_over_a_stream, options))
    assert rates == pytest.approx([0.025, 0.05, 0.075, *[0.1] * 6])


def test_least_rate_above_the_rates_is_refused():
    options = {"lr_schedule": "cosine", "lr_min": 0.5, "max_steps": 9}
    (error,) = ranks.run(1, rates_over_a_stream, options)
    assert isinstance(error, hpctrain.errors.UsageError)
    assert "--lr-min 0.5, and the highest rate of the optimizers is 0.1" in error.found
    assert error.fixes == ("--lr-min 0.01",)


def rates_of_layers(groups, options):
    """Return the rates of the optimizer's groups in each step, and the logged ones."""
    with session(batch_size=4, run_dir="run", max_steps=10, log_every=1, **options) as opened:
        model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        parts = [{"params": p.parameters(), **g} for p, g in zip(model, groups, strict=True)]
        model, optimizer = opened.prepare(model, torch.optim.AdamW(parts, lr=0.1))
        rates = []
        with opened.run() as run:
            for _ in run.epochs():
                for points in run.batches(torch.full((4, 1), float(n)) for n in range(10)):
                    rates.append([group["lr"] for group in optimizer.param_groups])
                    loss = model(points).mean()
                    opened.step(loss)
                    run.log(loss=loss)
        return rates, [row["lr"] for row in run.directory.rows() if "loss" in row]


def test_layerwise_rates_keep_their_ratio(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {
        "lr_scaling": "linear", "lr_reference_batch": 8, "lr_warmup_steps": 4,
        "lr_schedule": "cosine", "decay": "weights",
    }  # fmt: skip
    rates, logged = rates_of_layers([{"lr": 0.001}, {}], options)
    ratios = [[rate / row[-1] for rate in row] for row in rates]
    assert ratios == [pytest.approx([0.01, 0.01, 1, 1])] * 10  # a group without decay after each
    assert rates[0][-1] == pytest.approx(0.05 / 4)
    assert rates[4][-1] == pytest.approx(0.05)
    assert logged == pytest.approx([row[-1] for row in rates])


def test_least_rate_is_not_above_the_rate_of_any_layer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"lr_schedule": "cosine", "lr_min": 0.01}
    rates, _ = rates_of_layers([{"lr": 0.001}, {}], options)
    assert [row[0] for row in rates] == pytest.approx([0.001] * 10)
    curve = [0.01 + 0.09 * (1 + math.cos(math.pi * s / 10)) / 2 for s in range(10)]
    assert [row[1] for row in rates] == pytest.approx(curve)


def test_factors_of_timm_for_rates_are_refused_with_a_schedule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hpctrain.errors.UsageError, match="with lr_scale") as caught:
        rates_of_layers([{"lr_scale": 0.1}, {}], {"lr_schedule": "cosine"})
    assert caught.value.code == "HT610"
    assert 'group["lr"] = args.lr * group.pop("lr_scale")' in caught.value.fixes[0]


def decayed_parameters(decay):
    with session(batch_size=4, decay=decay) as opened:
        model = small_model()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
        model, optimizer = opened.prepare(model, optimizer)
        opened.step(sum((p * 0).sum() for p in model.parameters()))
        return {n: bool((p != before[n]).any()) for n, p in model.named_parameters()}


@HOROVOD_SLOW
def test_weight_decay_of_weights_only(run):
    for names in ranks.values(run(3, decayed_parameters, "weights")):
        assert [name for name, moved in names.items() if moved] == ["0.weight", "4.weight"]
    for names in ranks.values(run(3, decayed_parameters, "all")):
        assert sum(names.values()) > 2


def evaluate_averages(decay):
    with session(batch_size=4, precision="fp64", ema=decay) as opened:
        model = plain_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
        expected = [p.detach().clone() for p in model.parameters()]
        for batch, targets in list(opened.loader(images(240)))[:6]:
            opened.step(nn.functional.cross_entropy(model(batch), targets))
            if decay is not None:
                expected = [
                    decay * mean + (1 - decay) * p.detach()
                    for mean, p in zip(expected, model.parameters(), strict=True)
                ]
        last = [p.detach().clone() for p in model.parameters()]
        with opened.averaged_weights():
            inside = [p.detach().clone() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), last, strict=True))
        return inside, expected, last


@HOROVOD_SLOW
def test_ema_weights_in_an_evaluation(run):
    for inside, expected, last in ranks.values(run(3, evaluate_averages, 0.75)):
        for average, expected_average, weight in zip(inside, expected, last, strict=True):
            assert torch.allclose(average, expected_average, rtol=1e-13, atol=1e-15)
            assert not torch.equal(average, weight)
    for inside, _, last in ranks.values(run(1, evaluate_averages, None)):
        assert all(torch.equal(a, b) for a, b in zip(inside, last, strict=True))


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
        with opened.run(name="orders") as run:
            for _ in run.epochs():
                batches = run.batches(WrappedLoader(loader) if wrap else loader)
                seen.append([targets.tolist() for _, targets in batches])
        return seen


def test_wrapped_loader_shuffles_each_epoch():
    (plain,) = ranks.values(ranks.run(1, sample_orders, False))
    (wrapped,) = ranks.values(ranks.run(1, sample_orders, True))
    assert wrapped == plain
    assert len({str(epoch) for epoch in plain}) == 3


def save_in_averaged_weights():
    """Save at a break, and while the model has the averaged weights."""
    with session(batch_size=4, ema=0.5, run_dir="run", epochs=2) as opened:
        model = plain_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
        with opened.run(name="odd") as run:
            for _ in run.epochs():
                for number, (batch, targets) in enumerate(run.batches(opened.loader(images(240)))):
                    opened.step(nn.functional.cross_entropy(model(batch), targets))
                    if number == 2:
                        break
                with opened.averaged_weights():
                    averages = [p.detach().clone() for p in model.parameters()]
                    run.save()
                    inside = [
                        torch.equal(*pair)
                        for pair in zip(model.parameters(), averages, strict=True)
                    ]
                break
        return inside, [p.detach().clone() for p in model.parameters()]


def test_checkpoint_taken_inside_averaged_weights_has_the_weights():
    ((inside, weights),) = ranks.values(ranks.run(1, save_in_averaged_weights))
    assert all(inside)
    directory = RunDirectory("run")
    assert directory.steps() == [3]
    _, state = load_newest(directory)
    assert (state["position"]["step"], state["position"]["epoch_step"]) == (3, 3)
    (model,) = state["model"]
    assert all(torch.equal(a, b) for a, b in zip(model.values(), weights, strict=True))


def misuse_optimizer(how):
    with session(batch_size=4, decay="weights") as opened:
        model = plain_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
        if how == "closure":
            optimizer = torch.optim.LBFGS(model.parameters())
        if how == "unknown parameter":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        if how == "scheduler":
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model = opened.prepare(model)
        if how not in ("unprepared", "nothing"):
            optimizer = opened.prepare(optimizer)
        loss = model(torch.ones(4, 1, 8, 8)).sum()
        opened.step(loss, *([optimizer] if how == "unprepared" else []))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown parameter", "1 parameters of the SGD are in no prepared model"),
        ("scheduler", "a scheduler was made before session.prepare()"),
        ("closure", "a LBFGS, which calls a closure"),
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
