"""Learning-rate schedulers of a script's own are in the checkpoints without being named."""

import pytest
import torch
from battery import session
from torch import nn
from torch.optim import lr_scheduler

from hpctrain.errors import UsageError


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    """torch's compiler, which the first checkpoint of a process imports, sets a variable."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))


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
    """Steps by a metric, and gets its number here."""

    def __init__(self, optimizer):
        self.scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def step(self):
        self.scheduler.step(1.0)


def train(make, path, late=False, named=False, **options):
    """The rate of each step."""
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
def test_scheduler_goes_on_after_a_resume(make, late, named):
    whole = train(make, "whole", late, named, max_steps=14)
    cut = train(make, "cut", late, named, max_steps=7)
    rest = train(make, "cut", late, named, max_steps=14, resume=True)
    assert cut + rest == pytest.approx(whole, rel=1e-12)
    assert len(set(whole)) > 2


def two(optimizer):
    return lr_scheduler.StepLR(optimizer, 2), lr_scheduler.StepLR(optimizer, 3)


def test_two_schedulers_of_a_kind_for_one_optimizer_have_to_be_named():
    with pytest.raises(UsageError, match="two schedulers of the kind StepLR"):
        train(two, "run", max_steps=2)


def made_once(optimizer):
    return lr_scheduler.StepLR(optimizer, 3)


def made_twice(optimizer):
    """Leave an unused scheduler in a reference cycle, as a notebook cell that runs again does."""
    first = lr_scheduler.StepLR(optimizer, 2)
    first.itself = first
    return made_once(optimizer)


def test_unused_scheduler_is_not_counted():
    assert len(set(train(made_twice, "run", max_steps=8))) == 3


def test_unused_scheduler_beside_a_named_one_is_not_saved(caplog):
    train(made_twice, "run", named=True, max_steps=3)
    train(made_once, "run", named=True, max_steps=4, resume=True)
    assert "the checkpoint has" not in caplog.text


def test_checkpoint_with_a_scheduler_that_the_script_no_longer_has_is_said(caplog):
    train(warm_up, "run", max_steps=3)
    with session(batch_size=4, run_dir="run", resume=True, max_steps=4) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
        with opened.run() as run:
            for _ in run.epochs():
                for points in run.batches([torch.ones(4, 1)] * 5):
                    opened.step(model(points).mean())
    assert "the checkpoint has a LambdaLR of optimizer 0, and this script has not" in caplog.text
