"""Ranks that do different things, or have other weights, are told which ones, and what."""

import time
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
import torchmetrics
from battery import images, session, small_model
from torch import nn

from hpctrain import rundir
from hpctrain.errors import UsageError

SLOW = pytest.mark.slow
LOSS = nn.functional.cross_entropy
BACKENDS = pytest.mark.parametrize(
    "run", ["auto", pytest.param("horovod", marks=SLOW)], indirect=True
)


def whole_loader(opened):
    return opened.loader(images(240))


def loop(body, make_loader=whole_loader, **options):
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


def logs_on_rank_0(opened, run, number, model, loss):
    if opened.is_main:
        run.log(loss=loss)


def logs_other_names(opened, run, number, model, loss):
    run.log(**{"loss" if opened.is_main else "Loss": loss})


def sums_on_rank_0(opened, run, number, model, loss):
    if number == 3 and opened.is_main:
        opened.sum(1)


def saves_on_rank_0(opened, run, number, model, loss):
    if number == 3 and opened.is_main:
        run.save()


def leaves_on_rank_1(opened, run, number, model, loss):
    return "break" if number == 3 and opened.world.rank == 1 else None


def refused(results):
    """What rank 0 says, where all ranks are refused."""
    for result in results:
        assert isinstance(result, UsageError), result
    return str(results[0])


@BACKENDS
@pytest.mark.parametrize("body", [logs_on_rank_0, logs_other_names], ids=lambda b: b.__name__)
def test_ranks_that_log_other_names_are_named(run, body):
    said = refused(run(3, partial(loop, log_every=2), body))
    other = "Loss (2 times) up to step 2" if body is logs_other_names else "nothing"
    # While they train, and not at the checkpoint alone, which compares too.
    assert said.startswith("the ranks do not do the same: rank 0: step ")
    assert "logged loss (2 times) up to step 2" in said
    assert f"; ranks 1, 2: {said.partition('rank 0: ')[2].partition(', logged')[0]}" in said
    assert f"logged {other}" in said


def other_kinds():
    with session(batch_size=4) as opened:
        if opened.is_main:
            opened.sum(1)
        else:
            opened.classification(3).compute()


@BACKENDS
def test_ranks_that_wait_for_different_exchanges_are_named(run):
    for result in run(3, other_kinds):
        assert isinstance(result, UsageError), result
        assert "rank 0: session.sum() of 1 (test_disagreement.py line" in str(result)
        assert "ranks 1, 2: scores of 3 classes (test_disagreement.py line" in str(result)


def does_nothing(opened, run, number, model, loss):
    pass


def unequal_loader(opened):
    return list(opened.loader(images(96)))[opened.world.rank // 2 :]


@BACKENDS
def test_loaders_of_unequal_length_are_named_before_the_first_step(run):
    for result in run(3, loop, does_nothing, unequal_loader):
        assert isinstance(result, UsageError), result
        assert "ranks 0, 1: the batches of epoch 0, 8 steps" in str(result)
        assert "rank 2: the batches of epoch 0, 7 steps" in str(result)


def moves_its_own_weights(opened, run, number, model, loss):
    if number == 0 and opened.world.rank == 2:
        with torch.no_grad():
            model[4].bias.add_(1e-3)


def moves_later(opened, run, number, model, loss):
    if number == 7 and opened.world.rank == 2:
        with torch.no_grad():
            model[4].bias.add_(1e-3)


@BACKENDS
@pytest.mark.parametrize("body", [moves_its_own_weights, moves_later], ids=lambda b: b.__name__)
def test_ranks_with_other_weights_are_named_and_nothing_is_saved(run, body):
    said = refused(run(3, loop, body))
    step = 1 if body is moves_its_own_weights else 12
    assert f"after step {step} rank 2 and rank 0 do not have the same weights" in said
    assert "first in 4.bias" in said
    assert rundir.RunDirectory("run").steps() == []


@BACKENDS
@pytest.mark.parametrize(
    ("body", "layout", "accumulate"),
    [
        pytest.param(leaves_on_rank_1, (3,), 1, id="leaves"),
        pytest.param(leaves_on_rank_1, (3,), 2, id="leaves inside of a step", marks=SLOW),
        pytest.param(leaves_on_rank_1, (1, 2), 1, id="leaves on another host", marks=SLOW),
        pytest.param(sums_on_rank_0, (3,), 1, id="sums", marks=SLOW),
        pytest.param(sums_on_rank_0, (2, 1), 2, id="sums, two hosts", marks=SLOW),
        pytest.param(saves_on_rank_0, (3,), 1, id="saves", marks=SLOW),
    ],
)
def test_ranks_that_wait_at_two_places_are_ended_with_the_reason(run, body, layout, accumulate):
    begun = time.monotonic()
    results = run(3, partial(loop, accumulate=accumulate), body, layout=layout, timeout=50)
    assert time.monotonic() - begun < 40  # and not --timeout
    assert [str(result) for result in results] == ["the process ended without a result"] * 3
    log = "".join(path.read_text() for path in Path("run/logs").glob("watch-*.log"))
    assert "the ranks wait for each other at two places" in log
    assert "in the backward pass" in log or "in the update" in log


def shows_what_it_evaluated(opened, run, number, model, loss):
    if number == 3:
        for batch, _ in opened.loader(images(24), train=False):
            model(batch)
        if opened.is_main:
            time.sleep(14)  # longer than ranks at two places are left there


@pytest.mark.slow
def test_rank_that_is_slow_after_an_evaluation_is_waited_for():
    ranks.values(ranks.run(3, loop, shows_what_it_evaluated))


def counts_by_torchmetrics():
    torchmetrics.MeanMetric()
    loop(does_nothing)


@BACKENDS
def test_torchmetrics_that_would_not_sum_over_the_ranks_is_told_of(run):
    ranks.values(run(2, counts_by_torchmetrics))
    warned = "torchmetrics knows torch.distributed alone" in Path("run/logs/rank-0.log").read_text()
    assert warned == (run.keywords["env"]["TEST_BACKEND"] == "horovod")
