"""Backward passes and optimizer steps that the script calls itself, over every backend."""

import math
from types import MethodType

import pytest
import ranks
import torch
from battery import session
from torch import nn

import hpctrain
from hpctrain.errors import UsageError

BACKENDS = pytest.mark.parametrize("run", ["auto", "horovod"], indirect=True)
SAMPLES, STEPS = 12, 5


def batches(opened, count=STEPS):
    """Return this rank's micro-batches; all ranks together have the same samples in each step."""
    generator = torch.Generator().manual_seed(1)
    world, accumulate = opened.world, opened.batches.accumulate
    found = []
    for _ in range(count):
        step = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
        pieces = step.chunk(world.world_size * accumulate)
        found += [pieces[n * world.world_size + world.rank] for n in range(accumulate)]
    return found


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, 0.9)


def train(loop, optimizer=momentum, count=STEPS, own=True, **options):
    """Train by a loop over the batches; return weights, step, rows of metrics and what it gave."""
    options = {"precision": "fp64", "seed": 3, "run_dir": "run", "epochs": 1, **options}
    accumulate = options.get("accumulate", 1)
    options.setdefault("batch_size", 1)
    with session(**options) as opened:
        model = network()
        model, optimizer = opened.prepare(model, optimizer(model.parameters()))
        dtype = next(model.parameters()).dtype
        with opened.run() as run:
            for _ in run.epochs():
                given = []
                for batch in run.batches([b.to(dtype) for b in batches(opened, count)]):
                    given.append(loop(opened, model, optimizer, batch))
                    run.log(size=1.0)
        weights = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
        rows = run.directory.rows() if opened.is_main else []
        assert accumulate > 1 or opened.sync_gradients
        return weights.tolist(), run.step, rows, given


def loss_of(opened, model, batch):
    with opened.autocast():
        return (model(batch) ** 2).mean() + (batch.sum(1, keepdim=True) * model(batch)).mean()


def short(opened, model, optimizer, batch):
    opened.step(loss_of(opened, model, batch))


def cleared_last(opened, model, optimizer, batch):
    opened.backward(loss_of(opened, model, batch))
    optimizer.step()
    optimizer.zero_grad()


def cleared_first(opened, model, optimizer, batch):
    optimizer.zero_grad()
    opened.backward(loss_of(opened, model, batch))
    optimizer.step()


def clipped(opened, model, optimizer, batch):
    opened.backward(loss_of(opened, model, batch))
    norm = opened.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return norm if norm is None else norm.item()


def two_losses(opened, model, optimizer, batch):
    loss = loss_of(opened, model, batch)
    opened.backward(0.25 * loss, retain_graph=True)
    opened.backward(0.75 * loss)
    optimizer.step()
    optimizer.zero_grad()


def plain(opened, model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(opened, model, batch).backward()
    optimizer.step()


def plain_clipped(opened, model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(opened, model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def values(found):
    return ranks.values(found)


def weights(found):
    """Return the weights of all ranks, which must be equal, after all steps."""
    assert all(one[:2] == found[0][:2] for one in found)
    return found[0][0]


@BACKENDS
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loop", [cleared_first, cleared_last, two_losses])
def test_own_calls_are_the_short_form(run, tmp_path, monkeypatch, loop, accumulate):
    expected = weights(values(ranks.run(1, train, short)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    size = 3 if accumulate == 1 else 2
    found = values(run(size, train_accumulated, loop, accumulate))
    assert weights(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found[0][1] == STEPS


def train_accumulated(loop, accumulate, **options):
    return train(loop, accumulate=accumulate, **options)


@BACKENDS
def test_clipped_norm_is_returned_and_in_the_rows(run, tmp_path, monkeypatch):
    def in_folder(name, size, *arguments):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return values((run if size > 1 else ranks.run)(size, *arguments))

    (alone,) = in_folder("alone", 1, train_logging, clipped, 1)
    found = in_folder("three", 3, train_logging, clipped, 1)
    accumulated = in_folder("accumulated", 2, train_logging, clipped, 2)
    assert len(alone[3]) == STEPS
    assert all(norm > 0.05 for norm in alone[3])
    for one in found:
        assert one[3] == pytest.approx(alone[3], rel=1e-9)
    assert accumulated[0][3][::2] == [None] * STEPS
    assert accumulated[1][3][1::2] == pytest.approx(alone[3], rel=1e-9)
    assert weights(found) == pytest.approx(alone[0], rel=1e-9)
    assert weights(accumulated) == pytest.approx(alone[0], rel=1e-9)
    for one in (alone, found[0], accumulated[0]):
        assert [row["grad_norm"] for row in one[2]] == pytest.approx(alone[3], rel=1e-9)
    (by_option,) = in_folder("option", 1, train_clipped_by_option)
    assert by_option[0] == alone[0]
    assert [row["grad_norm"] for row in by_option[2]] == alone[3]


def train_logging(loop, accumulate):
    return train(loop, accumulate=accumulate, log_every=1)


def train_clipped_by_option():
    return train(short, clip_norm=0.05, log_every=1)


@BACKENDS
@pytest.mark.parametrize(("loop", "same"), [(plain, short), (plain_clipped, clipped)])
def test_plain_loop_of_torch_is_right(run, tmp_path, monkeypatch, loop, same):
    (alone,) = values(ranks.run(1, train, same))
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(tmp_path / "plain")
    found = values(run(3, train, loop))
    assert weights(found) == pytest.approx(alone[0], rel=1e-9)
    assert found[0][1] == STEPS


PLAIN = [
    ({"precision": "fp16", "loss_scale": 128}, 1),
    ({"precision": "fp32"}, 2),
]


@pytest.mark.parametrize(("options", "accumulate"), PLAIN)
def test_plain_backward_is_refused_where_it_would_be_wrong(
    tmp_path, monkeypatch, options, accumulate
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"replace loss.backward\(\) with session.backward\(loss\)"
    ):
        train(unclipped, accumulate=accumulate, **options)


def unclipped(opened, model, optimizer, batch):
    loss_of(opened, model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def clips_scaled(opened, model, optimizer, batch):
    opened.backward(loss_of(opened, model, batch))
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clips_unscaled(opened, model, optimizer, batch):
    opened.backward(loss_of(opened, model, batch))
    opened.unscale_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp16", "O2"])
def test_gradients_under_a_loss_scale(tmp_path, monkeypatch, precision):
    options = {"precision": precision, "loss_scale": 128}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="have the loss scale"):
        train(clips_scaled, run_dir="scaled", **options)
    expected = train(short, run_dir="short", clip_norm=0.05, **options)
    for loop in (clipped, *([clips_unscaled] if precision == "fp16" else [])):
        found = train(loop, run_dir=loop.__name__, **options)
        assert (found[0], found[1]) == (expected[0], expected[1])


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_two_optimizers_share_the_gradients_and_the_loss_scale(tmp_path, monkeypatch, precision):
    monkeypatch.chdir(tmp_path)
    expected = train_halves("one", precision, lambda first, second: [[*first, *second]])
    found = train_halves("two", precision, lambda first, second: [first, second])
    assert found == expected


def train_halves(name, precision, split):
    """Train with an optimizer for each part; under fp16, one step overflows."""
    with session(
        batch_size=1, precision=precision, run_dir=name, epochs=1, seed=3, max_nonfinite=99
    ) as opened:
        model = network()
        parts = split([*model[0].parameters()], [*model[2].parameters()])
        model, *optimizers = opened.prepare(model, *map(momentum, parts))
        scales = []
        with opened.run() as run:
            for _ in run.epochs():
                for number, batch in enumerate(run.batches(batches(opened, 6))):
                    factor = 1e9 if number == 2 and precision == "fp16" else 1.0
                    opened.backward(loss_of(opened, model, batch.float()) * factor)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    scales.append(opened.precision.numbers().get("loss_scale"))
        return [p.tolist() for p in model.parameters()], run.step, scales


def sharp(opened, model, optimizer, batch):
    """SAM: the gradient at the weights moved along the gradient."""
    opened.backward(loss_of(opened, model, batch))
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.add_(move)
    optimizer.zero_grad()
    opened.backward(loss_of(opened, model, batch))
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()


def by_closure(opened, model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(opened, model, batch)
        opened.backward(loss)
        return loss

    return optimizer.step(closure).item()


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")


def penalized(opened, model, optimizer, batch):
    """A gradient penalty, with second derivatives."""
    points = batch.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    opened.backward(((slopes.norm(dim=1) - 1) ** 2).mean() + model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()


def in_two_steps(opened, model, optimizer, batch):
    """Accumulation by the script: each half is a batch of its own."""
    for number, half in enumerate(batch.chunk(2)):
        opened.backward(0.5 * loss_of(opened, model, half))
        if number:
            optimizer.step()
            optimizer.zero_grad()


LOOPS = [
    (sharp, momentum),
    (by_closure, lbfgs),
    (penalized, momentum),
    (in_two_steps, momentum),
]


@BACKENDS
@pytest.mark.parametrize(("loop", "optimizer"), LOOPS)
def test_loop_with_several_passes_equals_one_process(run, tmp_path, monkeypatch, loop, optimizer):
    (alone,) = values(ranks.run(1, train, loop, optimizer))
    (tmp_path / "three").mkdir()
    monkeypatch.chdir(tmp_path / "three")
    found = values(run(3, train, loop, optimizer))
    assert weights(found) == pytest.approx(alone[0], rel=1e-7, abs=1e-10)
    assert (alone[1], found[0][1]) == (STEPS, STEPS)


def adversaries(accumulate=1):
    """A GAN, as torch's DCGAN example trains it; return the weights of both models."""
    with session(
        batch_size=1, accumulate=accumulate, precision="fp64", seed=3, epochs=1, run_dir="run"
    ) as opened:
        generator, critic = nn.Linear(6, 6), network()
        generator, critic, first, second = opened.prepare(
            generator, critic, momentum(generator.parameters()), momentum(critic.parameters())
        )
        with opened.run() as run:
            for _ in run.epochs():
                for batch in run.batches(batches(opened)):
                    second.zero_grad()
                    opened.backward(nn.functional.softplus(-critic(batch)).mean())
                    fake = generator(batch.flip(1))
                    opened.backward(nn.functional.softplus(critic(fake.detach())).mean())
                    second.step()
                    critic.requires_grad_(False)
                    first.zero_grad()
                    opened.backward(nn.functional.softplus(-critic(fake)).mean())
                    first.step()
                    critic.requires_grad_(True)
        both = [*generator.parameters(), *critic.parameters()]
        return torch.cat([p.detach().reshape(-1) for p in both]).tolist(), run.step


@BACKENDS
def test_gan_equals_one_process(run, tmp_path, monkeypatch):
    (expected,) = values(ranks.run(1, adversaries))
    (tmp_path / "several").mkdir()
    monkeypatch.chdir(tmp_path / "several")
    found = values(run(3, adversaries))
    assert weights(found) == pytest.approx(expected[0], rel=1e-9)
    assert found[0][1] == STEPS


@BACKENDS
def test_gan_with_accumulation_steps_alike_on_all_ranks(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # In the last micro-batch the generator meets the new critic, so one process has other weights.
    found = values(run(2, adversaries, 2))
    assert len(weights(found)) == 42 + 65
    assert found[0][1] == STEPS


def of_two_batches(opened, model, optimizer, batch):
    """Accumulation by the script over batches of the run."""
    opened.backward(0.5 * loss_of(opened, model, batch))
    opened.number = getattr(opened, "number", -1) + 1
    if opened.number % 2:
        optimizer.step()
        optimizer.zero_grad()


def test_rest_of_an_epoch_is_dropped_with_its_gradients(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = train(of_two_batches, count=5, epochs=2, run_dir="whole")
    assert whole[1] == 5
    lines = capsys.readouterr().err
    assert "1 micro-batches of an incomplete step are left out, as epoch 1 or its loop" in lines


def test_loop_whose_optimizer_never_steps_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no optimizer step"):
        train(lambda opened, model, optimizer, batch: opened.backward(model(batch).mean()))


def test_optimizer_is_its_own_again_after_the_session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = network()
    optimizer = momentum(model.parameters())
    with hpctrain.Session(precision="fp32", accumulate=2, batch_size=1) as opened:
        model, _ = opened.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).mean().backward()
    optimizer.step()
    schedule.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("in_class", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_zero_grad_of_an_optimizer_itself_is_called(tmp_path, monkeypatch, in_class, precision):
    monkeypatch.chdir(tmp_path)
    cleared, made = [], []

    def own(optimizer):
        torch.optim.SGD.zero_grad(optimizer)
        cleared.append(optimizer)

    class Own(torch.optim.SGD):
        zero_grad = own

    def optimizer(parameters):
        made.append(Own(parameters, 0.1) if in_class else torch.optim.SGD(parameters, 0.1))
        if not in_class:
            made[0].zero_grad = MethodType(own, made[0])
        return made[0]

    train(short, optimizer, precision=precision, batch_size=SAMPLES)
    assert len(cleared) == STEPS


def test_norm_can_only_be_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def measured(opened, model, optimizer, batch):
        opened.backward(loss_of(opened, model, batch))
        opened.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()

    assert train(measured, run_dir="measured")[0] == train(short, run_dir="short")[0]


@pytest.mark.parametrize("own", [False, True])
def test_weight_holds_for_one_micro_batch(tmp_path, monkeypatch, own):
    monkeypatch.chdir(tmp_path)
    moves = []
    with session(batch_size=1, precision="fp64", run_dir="run") as opened:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        model, optimizer = opened.prepare(model, optimizer)
        with opened.run() as run:
            for step in run.steps(4):
                before = model.weight.item()
                if step == 1:
                    opened.weight = 0.5
                loss = model(torch.ones(1, 1, dtype=torch.float64)).sum()  # gradient 1
                if own:
                    optimizer.zero_grad()
                    opened.backward(loss)
                    optimizer.step()
                else:
                    opened.step(loss)
                moves.append(before - model.weight.item())
    assert moves == pytest.approx([1.0, 0.5, 1.0, 1.0])


def change_gradients(how, guarded):
    """Change gradients between the backward pass and the step, in each micro-batch or the last."""
    with session(batch_size=2, accumulate=2, max_steps=3, run_dir="run") as opened:
        model = nn.Linear(3, 1)
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with opened.run() as run:
            for _ in run.steps(3):
                opened.backward(model(torch.ones(2, 3)).pow(2).mean())
                if opened.sync_gradients or not guarded:
                    if how == "cleared":
                        model.bias.grad = None
                    else:
                        model.weight.grad.add_(model.weight.detach(), alpha=0.5)
                optimizer.step()
                optimizer.zero_grad()
        return run.step


@pytest.mark.parametrize("how", ["cleared", "weight decay"])
def test_gradients_that_are_changed_in_each_micro_batch_are_refused(how):
    (refused,) = ranks.run(1, change_gradients, how, False)
    assert isinstance(refused, UsageError)
    assert refused.code == "HT604"


@pytest.mark.parametrize("how", ["cleared", "weight decay"])
def test_gradients_may_be_changed_in_the_last_micro_batch(how):
    assert ranks.values(ranks.run(1, change_gradients, how, True)) == [3]
