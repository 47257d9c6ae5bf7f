"""Learning rates against closed formulas, and against torch's schedulers where they agree."""

import math

import pytest
import torch
import torch._dynamo  # else the first optimizer of a test imports it and sets a variable
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from hpctrain.errors import UsageError
from hpctrain.optim import LAMB, Schedule, apply, scale

KINDS = ("constant", "cosine", "step", "polynomial")


def rates(make, steps, lr=1.0):
    """Return the learning rate of each step under a scheduler of torch."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=lr)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def factors(schedule, steps):
    return [schedule.factor(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "make", "steps"),
    [
        (Schedule("cosine", total_steps=50), lambda o: CosineAnnealingLR(o, 50), 51),
        (Schedule("step", step_every=7, step_factor=0.3), lambda o: StepLR(o, 7, 0.3), 40),
        (
            Schedule("polynomial", total_steps=50, power=2.0),
            lambda o: PolynomialLR(o, 50, power=2.0),
            60,
        ),
        (
            Schedule("polynomial", total_steps=30, power=1.0),
            lambda o: LinearLR(o, 1.0, 0.0, total_iters=30),
            40,
        ),
    ],
)
def test_lr_schedule_without_warmup_equals_torch(schedule, make, steps):
    assert factors(schedule, steps) == pytest.approx(rates(make, steps), abs=1e-12)


def chain_after_warm_up(warmup, make):
    """Return a maker of torch's chain of schedulers: 1 / warmup, …, 1, then another scheduler."""

    def make_chain(optimizer):
        first = LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)
        return SequentialLR(optimizer, [first, make(optimizer)], [warmup])

    return make_chain


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Schedule("cosine", 8, 40), lambda o: CosineAnnealingLR(o, 32)),
        (Schedule("polynomial", 8, 40, power=2.0), lambda o: PolynomialLR(o, 32, power=2.0)),
        (Schedule("constant", 8, 40), lambda o: ConstantLR(o, 1.0, total_iters=0)),
    ],
)
def test_lr_schedule_after_warmup_equals_torch(schedule, make):
    expected = rates(chain_after_warm_up(8, make), 40)
    assert factors(schedule, 40) == pytest.approx(expected, abs=1e-12)


def test_lr_warmup_is_linear():
    schedule = Schedule("constant", warmup_steps=5)
    assert factors(schedule, 7) == [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1, 1, 1]
    assert factors(Schedule("constant", warmup_steps=1), 2) == [1, 1]


@given(
    warmup=st.integers(0, 50),
    rest=st.integers(1, 200),
    power=st.floats(0.1, 8),
    step=st.integers(0, 300),
)
def test_lr_schedules_follow_their_formulas(warmup, rest, power, step):
    total = warmup + rest
    t = (min(step, total) - warmup) / rest
    cosine = Schedule("cosine", warmup, total).factor(step)
    polynomial = Schedule("polynomial", warmup, total, power=power).factor(step)
    if step < warmup:
        assert cosine == polynomial == (step + 1) / warmup
    else:
        assert cosine == pytest.approx((1 + math.cos(math.pi * t)) / 2, abs=1e-15)
        assert polynomial == pytest.approx((1 - t) ** power, abs=1e-12)


def test_lr_schedule_counts_steps_from_the_start():
    # Warm-up for 5 epochs, then a tenth after 30 and 60 of 90 epochs.
    schedule = Schedule("step", warmup_steps=5, total_steps=90, step_every=30, step_factor=0.1)
    assert schedule.factor(4) == schedule.factor(29) == 1
    assert schedule.factor(30) == pytest.approx(0.1)
    assert schedule.factor(89) == pytest.approx(0.01)


@given(
    kind=st.sampled_from(KINDS),
    warmup=st.integers(0, 1000),
    rest=st.integers(1, 10**9),
    every=st.integers(1, 10**6),
    factor=st.floats(0, 1),
    power=st.floats(1e-3, 1e3),
    step=st.integers(0, 10**12),
)
def test_lr_factor_is_between_0_and_1(kind, warmup, rest, every, factor, power, step):
    schedule = Schedule(kind, warmup, warmup + rest, every, factor, power)
    assert 0 <= schedule.factor(step) <= 1
    assert schedule.factor(warmup + rest + step) == schedule.factor(warmup + rest)


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])
def test_lr_schedule_without_an_end_is_refused(kind):
    with pytest.raises(UsageError) as caught:
        Schedule(kind, 10)
    assert caught.value.code == "HT410"
    assert caught.value.fixes == ("--epochs N", "--max-steps N")
    assert kind in caught.value.found


@pytest.mark.parametrize("warmup", [20, 21])
def test_lr_warmup_as_long_as_the_training_is_refused(warmup):
    with pytest.raises(UsageError, match=f"a warm-up of {warmup} of 20 steps") as caught:
        Schedule("constant", warmup, 20)
    assert caught.value.code == "HT411"
    Schedule("constant", 19, 20)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "linear"},
        {"warmup_steps": -1},
        {"total_steps": 0},
        {"step_every": 0, "kind": "step"},
        {"step_factor": 1.5},
        {"power": 0.0},
        {"least": -1.0},
        {"least": 0.1, "kind": "step"},
    ],
)
def test_invalid_lr_schedule_settings_are_refused(settings):
    with pytest.raises(UsageError) as caught:
        Schedule(**settings)
    assert caught.value.code == "HT406"
    assert str(next(iter(settings.values()))) in caught.value.found


def test_step_schedule_needs_its_length():
    Schedule("cosine", 0, 10, step_every=0)


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        (Schedule("cosine", 500, 9000), "warm-up 500 steps, cosine over 9,000 steps"),
        (Schedule(), "constant"),
        (Schedule("constant", 20), "warm-up 20 steps, constant"),
        (Schedule("step", 0, 9000, 3000, 0.1), "times 0.1 every 3,000 steps"),
        (Schedule("polynomial", 0, 90, power=2), "polynomial of power 2 over 90 steps"),
        (Schedule("cosine", 0, 90, least=1e-5), "cosine over 90 steps to 1e-05"),
    ],
)
def test_lr_schedule_description(schedule, line):
    assert schedule.describe() == line


def test_lr_scaling_with_the_global_batch():
    assert scale("none", 8192, 256) == 1
    assert scale("linear", 8192, 256) == 32
    assert scale("linear", 64, 256) == 0.25
    assert scale("sqrt", 8192, 512) == 4


def test_lr_schedule_keeps_the_base_rate_of_each_group():
    one, two = (nn.Parameter(torch.ones(1)) for _ in range(2))
    first = SGD([{"params": [one], "lr": 0.5}, {"params": [two], "lr": 0.25}])
    second = LAMB([nn.Parameter(torch.ones(1))], lr=2.0)
    for step, factor in ((1, 0.5), (2, 0.0), (0, 1.0)):
        apply([first, second], Schedule("polynomial", total_steps=2, power=1.0), step)
        lrs = [group["lr"] for o in (first, second) for group in o.param_groups]
        assert lrs == [0.5 * factor, 0.25 * factor, 2.0 * factor]


def test_base_lr_is_in_the_optimizer_state():
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    apply([optimizer], Schedule("constant", 10), 0)
    resumed = SGD([nn.Parameter(torch.ones(1))], lr=9.0)
    resumed.load_state_dict(optimizer.state_dict())
    apply([resumed], Schedule("constant", 10), 1)
    assert resumed.param_groups[0]["lr"] == pytest.approx(0.1)


def test_tensor_lr_stays_a_tensor():
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate, capturable=False)
    schedule = Schedule("polynomial", total_steps=4, power=1.0, least=0.125)
    for step, expected in ((2, 0.3125), (4, 0.125), (0, 0.5)):
        apply([optimizer], schedule, step)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == expected


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("cosine", lambda o: CosineAnnealingLR(o, 32, eta_min=0.01)),
        ("polynomial", lambda o: LinearLR(o, 1.0, 0.1, total_iters=32)),
    ],
)
def test_least_rate_equals_torch_after_a_warmup(kind, make):
    expected = rates(chain_after_warm_up(8, make), 41, lr=0.1)
    schedule = Schedule(kind, 8, 40, power=1.0, least=0.01)
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    seen = []
    for step in range(45):
        apply([optimizer], schedule, step)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen[:41] == pytest.approx(expected, abs=1e-15)
    assert seen[40:] == [0.01] * 5


@given(
    kind=st.sampled_from(("cosine", "polynomial")),
    warmup=st.integers(0, 20),
    rest=st.integers(1, 50),
    base=st.floats(1e-6, 10),
    least=st.floats(0, 10),
    step=st.integers(0, 100),
)
def test_rate_stays_between_the_least_and_the_base_rate(kind, warmup, rest, base, least, step):
    """A group whose base rate is below the least rate keeps its rate after the warm-up."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=base)
    apply([optimizer], Schedule(kind, warmup, warmup + rest, least=least), step)
    rate = optimizer.param_groups[0]["lr"]
    low = min(base, least)
    if step < warmup:
        assert rate == base * (step + 1) / warmup or rate == base * ((step + 1) / warmup)
    else:
        assert low * (1 - 1e-12) <= rate <= base * (1 + 1e-12)
    if step >= warmup + rest:
        assert rate == low
