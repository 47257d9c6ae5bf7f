"""Parameters that no rank used in a step have no gradient over Horovod, as over ddp."""

import logging
from functools import partial

import pytest
import ranks
import torch
from battery import session
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

pytestmark = pytest.mark.usefixtures("horovod")
HOROVOD = {"TEST_BACKEND": "horovod"}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.experts = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, inputs, used):
        return sum(self.experts[number](inputs) for number in used)


def first_step_only(step, piece):
    return (0, 1) if step == 0 else (0,)


def by_piece(step, piece):
    """Let the pieces of a step use different experts, so that ranks do as well."""
    return (0, 1) if step > 1 and piece < 6 else (0,)


def train(used, accumulate=1, steps=6, **options):
    """Train on 12 pieces in each step; weight decay would move what has a gradient of zeros."""
    options = {"run_dir": "run", "precision": "fp64", "checkpoint_every": 3, **options}
    with session(batch_size=1, accumulate=accumulate, **options) as opened:
        model = Experts().double()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer = opened.prepare(model, optimizer)
        world, bodies = opened.world, 0
        share = 12 // (world.world_size * accumulate)
        with opened.run() as run:
            for step in run.steps(steps):
                place = bodies % accumulate * world.world_size + world.rank
                bodies += 1
                losses = [
                    model(torch.full((1, 2), 0.1 * piece).double(), used(step, piece))
                    for piece in range(place * share, (place + 1) * share)
                ]
                opened.step(torch.cat(losses).pow(2).mean())
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def alone(used, **options):
    (found,) = ranks.values(ranks.run(1, partial(train, used, run_dir="alone", **options)))
    return pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 2), (2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("used", [first_step_only, by_piece])
def test_parameters_that_a_step_does_not_use_stay_as_in_one_process(used, size, accumulate):
    expected = alone(used)
    for found in ranks.values(ranks.run(size, train, used, accumulate, env=HOROVOD)):
        assert found == expected


def seldom(step, piece):
    return (0, 1) if step in (0, 10) else (0, 1, 2)


def killed_at_4(step, piece):
    if step == 4:
        raise KeyboardInterrupt
    return seldom(step, piece)


def train_on():
    """Continue behind the step that showed it; the first six passes of this start use all."""
    with pytest.raises(KeyboardInterrupt):
        train(killed_at_4, steps=12)
    return train(seldom, steps=12, resume=True)


def test_resumed_run_searches_as_the_one_before():
    expected = alone(seldom, steps=12)
    for found in ranks.values(ranks.run(2, train_on, env=HOROVOD)):
        assert found == expected


def late(step, piece):
    return (0, 1, 2) if step < 8 else (0, 1)


def test_parameter_that_is_unused_for_the_first_time_late_is_named():
    for found in ranks.run(3, partial(train, late, steps=10), env=HOROVOD):
        assert isinstance(found, UsageError)
        assert "no gradient was computed for experts.2.weight" in str(found)
        assert "--horovod find-unused-parameters" in str(found)


def test_option_searches_in_every_step():
    searching = partial(train, late, steps=10, horovod="find-unused-parameters")
    expected = alone(late, steps=10)
    for found in ranks.values(ranks.run(2, searching, env=HOROVOD)):
        assert found == expected


def lines_of_the_log():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    train(first_step_only)
    return [line for line in lines if "the loss does not use" in line]


def test_parameters_that_are_not_used_are_named_once():
    for lines in ranks.values(ranks.run(2, lines_of_the_log, env=HOROVOD)):
        (line,) = lines
        assert "experts.2.weight, experts.2.bias: the ranks look for such parameters" in line
