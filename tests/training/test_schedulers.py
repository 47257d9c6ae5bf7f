"""Prepared schedulers count the steps of the run, and continue after a resume."""

import pytest
import ranks
import torch
from battery import session
from torch import nn
from torch.optim import lr_scheduler

from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory


def warm_up(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def sequence(optimizer):
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.1, 4),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)


class Plateau:
    """A scheduler that steps by a metric."""

    def __init__(self, optimizer):
        self.scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def step(self):
        self.scheduler.step(1.0)


def train(make, path, late=False, named=False, bodies=5, **options):
    """Return the rate of each step."""
    options = {"batch_size": 4, **options}
    with session(run_dir=path, **options) as opened:
        model = nn.Linear(1, 1)
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))

        def prepared():
            schedule = make(optimizer)
            return schedule if named else opened.prepare(schedule)

        schedule = None if late else prepared()
        rates = []
        state = {"schedule": getattr(schedule, "scheduler", schedule)} if named else None
        with opened.run(state=state) as run:
            schedule = schedule or prepared()
            for _ in run.epochs():
                for points in run.batches([torch.ones(4, 1)] * bodies):
                    rates.append(optimizer.param_groups[0]["lr"])
                    opened.step(model(points).mean())
                    schedule.step()
        return rates


@pytest.mark.parametrize(
    ("make", "late", "named"),
    [
        (warm_up, False, False),
        (sequence, True, False),
        (one_cycle, False, False),
        (one_cycle, False, True),
        (Plateau, False, True),
    ],
)
def test_scheduler_continues_after_a_resume(make, late, named):
    uninterrupted = train(make, "uninterrupted", late, named, max_steps=14)
    cut = train(make, "cut", late, named, max_steps=7)
    rest = train(make, "cut", late, named, max_steps=14, resume=True)
    assert cut + rest == pytest.approx(uninterrupted, rel=1e-12)
    assert len(set(uninterrupted)) > 2


def train_accumulating(where, accumulate, batches=12, until=99, **options):
    """Return the rate of the body in which each step ends."""
    options = {"batch_size": 1, "epochs": 1, "run_dir": "run", **options}
    with session(accumulate=accumulate, **options) as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        schedule = lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 8)
        model, optimizer, schedule = opened.prepare(model, optimizer, schedule)
        rates = []
        with opened.run() as run:
            for _ in run.epochs():
                for number, points in enumerate(run.batches([torch.ones(1, 1)] * batches), 1):
                    if where == "before":
                        schedule.step()
                    opened.backward(model(points).mean())
                    optimizer.step()
                    if where == "between":
                        schedule.step()
                    optimizer.zero_grad()
                    if opened.sync_gradients:
                        rates.append(optimizer.param_groups[0]["lr"])
                    if where == "after":
                        schedule.step()
                    if number == until:
                        break
                if where == "epoch":
                    schedule.step()
        return rates, schedule.last_epoch, list(schedule.state_dict())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("size", [1, 2])
def test_scheduler_of_each_batch_counts_steps_and_not_micro_batches(where, size):
    expected, *_ = train_accumulating(where, 1, 6, run_dir="alone")
    for found, count, *_ in ranks.values(ranks.run(size, train_accumulating, where, 2, 12 * size)):
        assert found == pytest.approx(expected, rel=1e-12)
        assert count == 6


def test_scheduler_outside_of_the_body_always_counts():
    assert train_accumulating("epoch", 4, 8, epochs=3)[1] == 3


def test_scheduler_keeps_its_class_and_the_keys_of_its_state():
    plain = lr_scheduler.LinearLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0))
    assert train_accumulating("after", 2)[2] == list(plain.state_dict())
    with session(batch_size=1) as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        schedule = lr_scheduler.StepLR(optimizer, 1)
        opened.prepare(model, optimizer, schedule)
        assert isinstance(schedule, lr_scheduler.StepLR)
    assert type(schedule) is lr_scheduler.StepLR


def test_calls_in_dropped_micro_batches_do_not_count():
    assert train_accumulating("after", 3, 6, epochs=2, until=5)[1] == 2


def leave_the_loop_open():
    with session(accumulate=2, batch_size=1, epochs=1, run_dir="run") as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        parts = opened.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1))
        with opened.run() as run:
            for _ in run.epochs():
                bar = enumerate(run.batches([torch.ones(1, 1)] * 6))
                for number, points in bar:
                    opened.step(parts[0](points).mean())
                    if number == 2:
                        break
                parts[2].step()


def test_call_after_a_loop_that_is_still_open_is_refused():
    with pytest.raises(UsageError, match="left by break"):
        leave_the_loop_open()


def test_scheduler_does_not_follow_a_skipped_update():
    with session(
        batch_size=1, epochs=1, run_dir="run", precision="fp16", loss_scale=128, max_nonfinite=9
    ) as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer, schedule = opened.prepare(
            model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5)
        )
        rates = []
        with opened.run() as run:
            for _ in run.epochs():
                for number, points in enumerate(run.batches([torch.ones(1, 1)] * 5)):
                    opened.step(model(points).mean() * (1e38 if number == 1 else 1.0))
                    schedule.step()
                    rates.append(schedule.last_epoch)
    assert rates == [1, 1, 2, 3, 4]


def train_with_unprepared_scheduler():
    with session(batch_size=1, epochs=1, run_dir="run", checkpoint_every=1) as opened:
        model = nn.Linear(1, 1)
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        lr_scheduler.StepLR(optimizer, 1)
        with opened.run() as run:
            for _ in run.epochs():
                for points in run.batches([torch.ones(1, 1)] * 5):
                    opened.step(model(points).mean())


def test_unprepared_scheduler_is_refused_at_the_first_step():
    with pytest.raises(UsageError, match="has a scheduler that was not prepared"):
        train_with_unprepared_scheduler()
    assert RunDirectory("run").steps() == []


def test_scheduler_of_another_optimizer_is_refused():
    model = nn.Linear(1, 1)
    schedule = lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 1.0), 1)
    with session(batch_size=1) as opened, pytest.raises(UsageError, match="StepLR of an optimizer"):
        opened.prepare(schedule)


def test_two_prepared_schedulers_of_one_class_must_be_named():
    with session(batch_size=1, epochs=1, run_dir="run") as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        opened.prepare(
            model, optimizer, lr_scheduler.StepLR(optimizer, 2), lr_scheduler.StepLR(optimizer, 3)
        )
        with pytest.raises(UsageError, match="two schedulers of the class StepLR"), opened.run():
            pass


def test_scheduler_of_a_checkpoint_that_the_script_lacks_is_logged(capsys):
    train(warm_up, "run", max_steps=3)
    with session(batch_size=4, run_dir="run", resume=True, max_steps=4) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
        with opened.run() as run:
            for _ in run.epochs():
                for points in run.batches([torch.ones(4, 1)] * 5):
                    opened.step(model(points).mean())
    assert (
        "the checkpoint has a LambdaLR of optimizer 0, and this script has not"
        in capsys.readouterr().err
    )


def save_and_resume(where, path, until, **options):
    """Save at step 3, in a body of 5 batches or behind it, and stop there as a kill would."""
    with session(batch_size=1, run_dir=path, **options) as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        model, optimizer, schedule = opened.prepare(
            model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9)
        )
        lines = []
        with opened.run(state={"lines": lines}) as run:
            for epoch in run.epochs(3):
                for points in run.batches([torch.ones(1, 1)] * 4):
                    if where == "first" and run.step == 3:
                        run.save()
                    opened.step(model(points).mean())
                    if where == "middle" and run.step == 3:
                        run.save()
                    schedule.step()
                    if run.step >= until:
                        raise KeyboardInterrupt
                schedule.step()
                lines.append(epoch)
                if where == "behind" and epoch == 1:
                    run.save()
                    if until < 99:
                        raise KeyboardInterrupt
        return optimizer.param_groups[0]["lr"], model.weight.item(), lines


@pytest.mark.parametrize(
    ("where", "until", "saved"), [("first", 5, [4]), ("middle", 4, [3]), ("behind", 98, [4])]
)
def test_lines_behind_a_save_run_once_over_a_resume(where, until, saved):
    expected = save_and_resume(where, "whole", 99)
    with pytest.raises(KeyboardInterrupt):
        save_and_resume(where, "cut", until)
    assert RunDirectory("cut").steps() == saved
    assert save_and_resume(where, "cut", 99, resume=True) == expected


def save_in_every_micro_batch():
    with session(batch_size=1, accumulate=3, run_dir="run", keep_checkpoints=9) as opened:
        model = nn.Linear(1, 1)
        opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with opened.run() as run:
            for _ in run.epochs(1):
                for points in run.batches([torch.ones(1, 1)] * 12):
                    opened.step(model(points).mean())
                    if run.step == 2:
                        run.save()
        return run.directory.steps()


def test_save_in_each_micro_batch_saves_once():
    assert save_in_every_micro_batch() == [2, 4]
