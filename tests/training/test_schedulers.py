"""Learning-rate schedulers of a script are saved in checkpoints without being named."""

import pytest
import torch
from battery import session
from torch import nn
from torch.optim import lr_scheduler

from hpctrain.errors import UsageError


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


def train(make, path, late=False, named=False, **options):
    """Return the rate of each step."""
    with session(batch_size=4, run_dir=path, **options) as opened:
        model = nn.Linear(1, 1)
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
        schedule = None if late else make(optimizer)
        rates = []
        state = {"schedule": getattr(schedule, "scheduler", schedule)} if named else None
        with opened.run(state=state) as run:
            schedule = schedule or make(optimizer)
            for _ in run.epochs():
                for points in run.batches([torch.ones(4, 1)] * 5):
                    rates.append(optimizer.param_groups[0]["lr"])
                    opened.step(model(points).mean())
                    schedule.step()
        return rates


@pytest.mark.parametrize(
    ("late", "named"),
    [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.slow)],
    ids=["before the run", "inside of the run", "named"],
)
@pytest.mark.parametrize("make", [warm_up, sequence, one_cycle, Plateau], ids=lambda m: m.__name__)
def test_scheduler_continues_after_a_resume(make, late, named):
    uninterrupted = train(make, "uninterrupted", late, named, max_steps=14)
    cut = train(make, "cut", late, named, max_steps=7)
    rest = train(make, "cut", late, named, max_steps=14, resume=True)
    assert cut + rest == pytest.approx(uninterrupted, rel=1e-12)
    assert len(set(uninterrupted)) > 2


def make_two(optimizer):
    return lr_scheduler.StepLR(optimizer, 2), lr_scheduler.StepLR(optimizer, 3)


def test_two_schedulers_of_one_class_for_one_optimizer_must_be_named():
    with pytest.raises(UsageError, match="two schedulers of the class StepLR"):
        train(make_two, "run", max_steps=2)


def make_one(optimizer):
    return lr_scheduler.StepLR(optimizer, 3)


def make_again(optimizer):
    """Leave an unused scheduler in a reference cycle, as a notebook cell that runs again does."""
    first = lr_scheduler.StepLR(optimizer, 2)
    first.itself = first
    return make_one(optimizer)


def test_unused_scheduler_is_not_counted():
    assert len(set(train(make_again, "run", max_steps=8))) == 3


def test_unused_scheduler_beside_a_named_one_is_not_saved(capsys):
    train(make_again, "run", named=True, max_steps=3)
    train(make_one, "run", named=True, max_steps=4, resume=True)
    assert "the checkpoint has" not in capsys.readouterr().err


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
