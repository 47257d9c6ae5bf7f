"""Without an interval, the measured cost of a checkpoint decides where the next one is."""

from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import ranks
import torch
from battery import images, small_model
from clock import Clock
from torch import nn

import hpctrain
from hpctrain.rundir import RunDirectory
from hpctrain.training import checkpoint_manager
from hpctrain.training.checkpoint_manager import Spacing


def simulate(stalls, seconds):
    """Return the times of saves, and the share of the time that they took, if steps take 1 s."""
    clock = Clock(lambda: 0.0)
    spacing, saves, spent = Spacing(clock), [], 0.0
    while clock() < seconds:
        clock.move(1.0)
        if spacing.due():
            stall = stalls(len(saves))
            clock.move(stall)
            spacing.saved(stall)
            saves.append(clock())
            spent += stall
    return saves, spent / clock()


@pytest.mark.parametrize("stall", [0.001, 0.05, 0.3, 1.0, 2.9])
def test_saves_take_at_most_half_a_percent_of_the_time(stall):
    saves, share = simulate(lambda _: stall, 36_000)
    assert len(saves) >= 36_000 // 620
    assert share <= 0.005
    gaps = [after - before for before, after in pairwise(saves)]
    assert max(gaps) <= 600 + stall + 1.0
    assert min(gaps) >= max(10.0, stall / 0.005)


def test_at_most_ten_minutes_pass_even_if_a_save_takes_minutes():
    saves, _ = simulate(lambda _: 120.0, 36_000)
    assert all(b - a <= 600 + 120 + 1 for a, b in pairwise(saves))


def test_an_unusually_slow_save_is_made_up_for():
    """After a save of 2 s, cheaper ones wait until the share of all is small enough again."""
    saves, share = simulate(lambda number: 2.0 if number == 0 else 0.01, 7_200)
    assert share <= 0.005
    assert saves[0] <= 65
    assert saves[1] - saves[0] > 300


def train(speed=None, **options):
    """Train three epochs of four steps, on a clock that only steps move, and only at rank 0."""
    clock = Clock()
    spacing = mock.patch.object(checkpoint_manager, "Spacing", partial(Spacing, clock))
    with spacing, hpctrain.Session(global_batch=12, epochs=3, run_dir="run", **options) as session:
        torch.manual_seed(0)
        model = small_model()
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        loader, saved = session.loader(images(48)), []
        with session.run() as run:
            for _ in run.epochs():
                for inputs, targets in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    if session.step(loss) and speed:
                        clock.move(speed if session.is_main else 0.0)
                saved.append(RunDirectory("run").steps())
        return saved, [p.detach().clone() for p in model.parameters()]


def steps_after(results):
    return ranks.values(results)[0][0], RunDirectory("run").steps()


def test_run_without_an_interval_saves_its_last_step_and_not_each_short_epoch():
    saved, last = steps_after(ranks.run(3, train))
    assert saved == [[], [], []]
    assert last == [12]


@pytest.mark.parametrize(
    "options", [{"checkpoint_minutes": 60.0}, {"checkpoint_every": 100}, {"keep_best": "top1"}]
)
def test_run_with_an_interval_or_a_best_checkpoint_saves_each_epoch(options):
    _, last = steps_after(ranks.run(3, partial(train, **options)))
    assert last == [4, 8, 12]


def test_rank_zero_decides_for_all_ranks_when_the_time_has_come():
    _, last = steps_after(ranks.run(3, train, 300.0))
    assert last[-1] == 12
    assert len(last) > 1


def test_spacing_changes_no_bit_of_a_deterministic_run():
    found = []
    for number, options in enumerate(({}, {"checkpoint_every": 1}, {"speed": 600.0})):
        results = ranks.run(3, partial(train, deterministic=True, **options))
        found.append(ranks.values(results)[0][1])
        RunDirectory("run").path.rename(f"run-{number}")
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def resume(run_dir, **options):
    with (
        hpctrain.Session(batch_size=4, max_steps=1, run_dir=run_dir, **options) as session,
        session.run() as run,
    ):
        return run.step


def test_resume_that_finds_no_checkpoint_says_so(tmp_path, capfd):
    line = f"there is no checkpoint in {tmp_path / 'new'}: the run starts at step 0"
    assert resume(tmp_path / "new", resume=True) == 0
    assert capfd.readouterr().err.count(line) == 1
    assert resume(tmp_path / "other") == 0
    assert "there is no checkpoint" not in capfd.readouterr().err
