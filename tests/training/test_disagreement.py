"""Ranks that do different things or have different weights: errors name the ranks."""

import time
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
import torchmetrics
from battery import images, session, small_model
from torch import nn

import hpctrain
from hpctrain import rundir
from hpctrain.errors import UsageError

SLOW = pytest.mark.slow
LOSS = nn.functional.cross_entropy
BACKENDS = pytest.mark.parametrize(
    "run", ["auto", pytest.param("horovod", marks=SLOW)], indirect=True
)


def full_loader(opened):
    return opened.loader(images(240))


def loop(body, make_loader=full_loader, **options):
    options = {"batch_size": 4, "max_steps": 12, "run_dir": "run", "timeout": 60, **options}
    with session(**options) as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        loader = make_loader(opened)
        with opened.run() as run:
            for _ in run.epochs():
                for number, (batch, targets) in enumerate(run.batches(loader)):
                    loss = LOSS(model(batch), targets)
                    opened.step(loss)
                    if body(opened, run, number, model, loss) == "break":
                        break


def log_on_rank_0(opened, run, number, model, loss):
    if opened.is_main:
        run.log(loss=loss)


def log_other_names(opened, run, number, model, loss):
    run.log(**{"loss" if opened.is_main else "Lo\tss": loss})


def sum_on_rank_0(opened, run, number, model, loss):
    if number == 3 and opened.is_main:
        opened.sum(1)


def save_on_rank_0(opened, run, number, model, loss):
    if number == 3 and opened.is_main:
        run.save()


def break_on_rank_1(opened, run, number, model, loss):
    return "break" if number == 3 and opened.world.rank == 1 else None


def message_of_rank_0(results):
    """Return the message of rank 0; check that all ranks raise an error."""
    for result in results:
        assert isinstance(result, UsageError), result
    return str(results[0])


@BACKENDS
@pytest.mark.parametrize("body", [log_on_rank_0, log_other_names], ids=lambda b: b.__name__)
def test_ranks_that_log_other_names_are_named(run, body):
    message = message_of_rank_0(run(3, partial(loop, log_every=2), body))
    other = "Lo\tss (2 times) up to step 2" if body is log_other_names else "nothing"
    # During training, and not only at the checkpoint, which compares too.
    assert message.startswith("the ranks make different calls: rank 0: step ")
    assert "logged loss (2 times) up to step 2" in message
    assert (
        f"; ranks 1 and 2: {message.partition('rank 0: ')[2].partition(', logged')[0]}" in message
    )
    assert f"logged {other} (test_disagreement.py line " in message


def compute_on_rank_1():
    with session(batch_size=4) as opened:
        if opened.is_main:
            opened.sum(1)
        else:
            opened.classification(3).compute()


@BACKENDS
def test_ranks_that_wait_for_different_collectives_are_named(run):
    for result in run(3, compute_on_rank_1):
        assert isinstance(result, UsageError), result
        assert "rank 0: session.sum() of 1 (test_disagreement.py line" in str(result)
        assert "ranks 1 and 2: scores of 3 classes (test_disagreement.py line" in str(result)


def do_nothing(opened, run, number, model, loss):
    pass


def change_weights(opened, run, number, model, loss):
    if number == 0 and opened.world.rank == 2:
        with torch.no_grad():
            model[4].bias.add_(1e-3)


@BACKENDS
def test_ranks_with_other_weights_are_named_and_nothing_is_saved(run):
    """Ranks that were never equal have a mistake in their script."""
    message = message_of_rank_0(run(3, loop, change_weights))
    assert "after step 1 the weights of rank 2 and of rank 0 differ" in message
    assert "first in 4.bias" in message
    assert rundir.RunDirectory("run").steps() == []


@BACKENDS
@pytest.mark.parametrize(
    ("body", "layout", "accumulate"),
    [
        pytest.param(break_on_rank_1, (3,), 1, id="leaves"),
        pytest.param(break_on_rank_1, (3,), 2, id="leaves inside of a step", marks=SLOW),
        pytest.param(break_on_rank_1, (1, 2), 1, id="leaves on another host", marks=SLOW),
        pytest.param(sum_on_rank_0, (3,), 1, id="sums", marks=SLOW),
        pytest.param(sum_on_rank_0, (2, 1), 2, id="sums, two hosts", marks=SLOW),
        pytest.param(save_on_rank_0, (3,), 1, id="saves", marks=SLOW),
    ],
)
def test_ranks_that_wait_at_two_places_are_ended_with_the_reason(run, body, layout, accumulate):
    # The ranks end well before --timeout: the test waits for three minutes.
    results = run(3, partial(loop, accumulate=accumulate, timeout=1000), body, layout=layout)
    assert [str(result) for result in results] == ["the process ended without a result"] * 3
    log = "".join(path.read_text() for path in Path("run/logs").glob("watch-*.log"))
    assert "the ranks wait for each other at two places" in log
    assert "in the backward pass" in log or "in the update" in log


def pause_after_evaluation(opened, run, number, model, loss):
    if number == 3:
        for batch, _ in opened.loader(images(24), train=False):
            model(batch)
        if opened.is_main:
            time.sleep(14)  # longer than the limit for ranks at two places


@pytest.mark.slow
def test_ranks_wait_for_a_rank_that_is_slow_after_an_evaluation():
    ranks.values(ranks.run(3, loop, pause_after_evaluation))


def train_with_torchmetrics():
    torchmetrics.MeanMetric()
    loop(do_nothing)


@BACKENDS
def test_torchmetrics_without_sums_over_ranks_is_a_warning(run):
    ranks.values(run(2, train_with_torchmetrics))
    warned = "torchmetrics knows torch.distributed alone" in Path("run/logs/rank-0.log").read_text()
    assert warned == (run.keywords["env"]["TEST_BACKEND"] == "horovod")


def prepare_layers(kind):
    """Prepare a model whose rank 2 differs by its order, shape or frozen parameters."""
    with session(batch_size=2) as opened:
        odd, names = opened.world.rank == 2, ["a", "b", "c"]
        sizes = {"c": 3} if odd and kind == "shape" else {}
        ordered = names[::-1] if odd and kind == "layers" else names
        model = nn.ModuleDict({name: nn.Linear(2, sizes.get(name, 2)) for name in ordered})
        if odd and kind == "frozen":
            model["a"].weight.requires_grad_(False)
        if odd and kind == "less":
            del model["c"]
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            parameters[::-1] if odd and kind == "optimizer" else parameters
        )
        opened.prepare(model, optimizer)


DIFFERENT = {
    "layers": "number 2 is c.weight (2, 2) float32 on rank 2, and a.weight (2, 2) float32 on",
    "shape": "number 6 is c.weight (3, 2) float32 on rank 2, and c.weight (2, 2) float32 on",
    "frozen": "number 2 is a.weight (2, 2) float32, frozen on rank 2, and a.weight (2, 2) float32",
    "less": "number 6 is AdamW on rank 2, and c.weight (2, 2) float32 on rank 0",
    "optimizer": "number 9 is c.bias of model 0 in group 0 on rank 2, and a.weight of model 0 in",
}


@pytest.mark.parametrize("run", ["auto", "fsdp", "horovod"], indirect=True)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_prepare_other_parameters_are_named(run, kind):
    message = message_of_rank_0(run(3, prepare_layers, kind))
    assert message.startswith(
        f"other objects are prepared on rank 2 than on rank 0: {DIFFERENT[kind]}"
    )


def reduce_rate_by_own_loss(backend, epochs):
    """Let a scheduler see the loss of this rank alone, which improves on rank 1 only."""
    with hpctrain.Session(batch_size=4, backend=backend, epochs=epochs, run_dir="run") as opened:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        model, optimizer, scheduler = opened.prepare(model, optimizer, scheduler)
        with opened.run() as run:
            for epoch in run.epochs():
                for batch in run.batches(opened.loader(torch.ones(24, 3))):
                    opened.step(model(batch).pow(2).mean())
                scheduler.step(1.0 - epoch * (opened.world.rank == 1))


# After two epochs no step follows; after three, the weights differ as well.
@pytest.mark.parametrize("epochs", [2, 3])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_learning_rates_that_differ_are_no_fault_of_a_node(backend, epochs):
    for result in ranks.run(3, reduce_rate_by_own_loss, backend, epochs):
        assert isinstance(result, UsageError), result
        lowest = 0.125 / 10 ** (epochs - 1)
        first, other = result.found.removeprefix("lr of the SGD: ").split(" on rank 0, and ")
        assert (float(first), other) == (pytest.approx(lowest), "0.125 on rank 1")
        assert "as for ReduceLROnPlateau" in result.fixes[0]
