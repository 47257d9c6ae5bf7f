"""hpctrain.compat.apex: amp, parallel and optimizers for scripts written for Apex."""

import contextlib
import copy
import logging
import math
import os
import re
import runpy
import socket
import warnings
from pathlib import Path

import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import nn

import hpctrain
from hpctrain.compat import apex
from hpctrain.compat.apex import amp
from hpctrain.data import digits
from hpctrain.errors import UsageError

STEPS = 6


def batches(count=STEPS):
    train_set, _ = digits()
    for step in range(count):
        images, targets = zip(*(train_set[32 * step + i] for i in range(32)), strict=True)
        yield torch.stack(images), torch.tensor(targets)


def net(seed=0):
    """Return a model with batch norm, and with weights that half precision represents exactly."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    return model


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def initialize(level, seed=0, **keywords):
    model = net(seed)
    return amp.initialize(model, sgd(model), opt_level=level, **keywords)


def step(model, optimizer, images, targets, factor=1.0, **keywords):
    """Take a step as scripts written for Apex do; return the loss."""
    loss = F.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    with amp.scale_loss(loss * factor, optimizer, **keywords) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


def losses_and_state(losses, model):
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(level, **keywords):
    model, optimizer = initialize(level, **keywords)
    return losses_and_state([step(model, optimizer, *batch) for batch in batches()], model)


def train_without_amp(dtype=torch.float32):
    model = net().to(dtype)
    optimizer = sgd(model)
    losses = []
    for images, targets in batches():
        loss = F.cross_entropy(model(images.to(dtype)).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses_and_state(losses, model)


def train_by_autocast(clip=None, accumulate=1):
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for number, (images, targets) in enumerate(batches()):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(images), targets)
        scaler.scale(loss / accumulate).backward()
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses_and_state(losses, model)


def train_in_session():
    """Train with O2 of a Session; return its master weights."""
    with hpctrain.Session(precision="O2", backend="single") as session:
        model = net()
        model, _ = session.prepare(model, sgd(model))
        losses = []
        for images, targets in batches():
            loss = F.cross_entropy(model(images), targets)
            session.step(loss)
            losses.append(loss.item())
        weights = dict(model.state_dict())
        for name, parameter in model.named_parameters():
            weights[name] = session.precision.master(parameter).detach()
        return losses, weights


def one_rank(function, *arguments):
    (result,) = ranks.values(ranks.run(1, function, *arguments))
    return result


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert value.dtype == other[1][name].dtype, name
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize(
    ("level", "reference"),
    [
        ("O0", (train_without_amp,)),
        ("O1", (train_by_autocast,)),
        ("O2", (train_in_session,)),
        ("O3", (train_without_amp, torch.float16)),
    ],
)
def test_amp_opt_level_is_bit_equal_to_its_reference(level, reference):
    result, reference = one_rank(train, level), one_rank(*reference)
    assert_same(result, reference)
    assert result[0][-1] < result[0][0]


def train_with_clipping(level, largest):
    model, optimizer = initialize(level)
    losses, norms = [], []
    for images, targets in batches():
        loss = F.cross_entropy(model(images), targets)
        losses.append(loss.item())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), largest)
        grads = [p.grad for p in amp.master_params(optimizer)]
        norms.append(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).item())
        optimizer.step()
        model.zero_grad()
    return losses_and_state(losses, model), norms


def test_amp_clips_the_gradients_that_the_step_takes():
    result, norms = one_rank(train_with_clipping, "O1", 0.1)
    assert_same(result, one_rank(train_by_autocast, 0.1))
    assert max(norms) <= 0.1 * (1 + 1e-5)
    _, norms = one_rank(train_with_clipping, "O2", 0.1)
    assert norms == pytest.approx([0.1] * STEPS, rel=1e-4)


def test_amp_model_zero_grad_equals_optimizer_zero_grad():
    result, _ = one_rank(train_with_clipping, "O2", 1e9)
    assert_same(result, one_rank(train, "O2"))


def train_with_accumulation(level, delay):
    model, optimizer = initialize(level)
    losses = []
    for number, (images, targets) in enumerate(batches()):
        last = (number + 1) % 2 == 0
        loss = F.cross_entropy(model(images), targets)
        losses.append(loss.item())
        delayed = delay and not last
        with amp.scale_loss(loss / 2, optimizer, delay_unscale=delayed) as scaled_loss:
            scaled_loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses_and_state(losses, model)


def test_amp_gradient_accumulation():
    assert_same(one_rank(train_with_accumulation, "O1", True), one_rank(train_by_autocast, None, 2))
    for level in ("O1", "O2"):
        delayed, each = (
            one_rank(train_with_accumulation, level, True),
            one_rank(train_with_accumulation, level, False),
        )
        assert delayed[0] == pytest.approx(each[0], rel=1e-3)
    # The step averages two micro-batches, and differs from a step of either alone.
    assert one_rank(train_with_accumulation, "O2", False)[0][2:] != one_rank(train, "O2")[0][2:]


@contextlib.contextmanager
def captured_log():
    """Capture the log messages."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hpctrain")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def train_with_overflow(level):
    model, optimizer = initialize(level)
    (first, second, third) = batches(3)
    step(model, optimizer, *first)
    before = losses_and_state([], model)
    with captured_log() as messages:
        step(model, optimizer, *second, factor=1e38)
    after = losses_and_state([], model)
    scales = [amp.state_dict()["loss_scaler0"]]
    step(model, optimizer, *third)
    scales.append(amp.state_dict()["loss_scaler0"])
    return before, after, losses_and_state([], model), scales, messages


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_overflow_skips_one_step_and_halves_the_loss_scale(level):
    before, after, later, scales, messages = one_rank(train_with_overflow, level)
    parameters = [name for name in before[1] if "running" not in name and "num_" not in name]
    assert all(torch.equal(before[1][name], after[1][name]) for name in parameters)
    assert not all(torch.equal(after[1][name], later[1][name]) for name in parameters)
    assert scales == [
        {"loss_scale": 2.0**15, "unskipped": 0},
        {"loss_scale": 2.0**15, "unskipped": 1},
    ]
    assert messages == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768"
    ]


def train_and_resume(level):
    model, optimizer = initialize(level)
    data = list(batches())
    losses = [step(model, optimizer, *batch) for batch in data[:3]]
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], "checkpoint.pt")
    model, optimizer = initialize(level, seed=1)
    state = torch.load("checkpoint.pt", weights_only=True)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    amp.load_state_dict(state[2])
    assert amp.state_dict() == state[2] == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}}
    return losses_and_state(losses + [step(model, optimizer, *batch) for batch in data[3:]], model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_amp_resume_is_bit_equal(level):
    result = one_rank(train_and_resume, level)
    assert_same(result, one_rank(train, level))
    assert all(v.dtype == torch.float32 for v in result[1].values() if v.is_floating_point())


def load_apex_state():
    model, optimizer = initialize("O2", num_losses=2, max_loss_scale=2.0**16)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 1999},
            "loss_scaler1": {"loss_scale": 128.0, "unskipped": 4},
        }
    )
    ((images, targets),) = batches(1)
    step(model, optimizer, images, targets)
    grown = amp.state_dict()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1999}})
    step(model, optimizer, images, targets)
    return grown, amp.state_dict()


def test_amp_loads_state_of_apex_with_loss_scale_bounds():
    grown, bounded = one_rank(load_apex_state)
    assert grown == {
        "loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 128.0, "unskipped": 4},
    }
    assert bounded["loss_scaler0"]["loss_scale"] == 2.0**16


def train_two_models():
    models = [net(0), net(1)]
    optimizers = [sgd(model) for model in models]
    returned = amp.initialize(
        models, optimizers, opt_level="O2", num_losses=2, min_loss_scale=2**15
    )
    assert returned[0][0] is models[0]
    assert returned[1][1] is optimizers[1]
    ((images, targets),) = batches(1)
    before = [losses_and_state([], model) for model in models]
    for _ in range(2):
        for number, factor in enumerate((1.0, 1e38)):
            loss = F.cross_entropy(models[number](images), targets) * factor
            with amp.scale_loss(loss, optimizers[number], loss_id=number) as scaled_loss:
                scaled_loss.backward()
            optimizers[number].step()
            optimizers[number].zero_grad()
    moved = [
        not torch.equal(old[1]["4.weight"], model.state_dict()["4.weight"])
        for old, model in zip(before, models, strict=True)
    ]
    scales = [state["loss_scale"] for state in amp.state_dict().values()]
    both = sum(F.cross_entropy(model(images), targets) for model in models) * 1e38
    with amp.scale_loss(both, optimizers, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    weight = losses_and_state([], models[0])[1]["4.weight"]
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(weight, models[0].state_dict()["4.weight"])
    return moved, scales


def test_amp_several_losses_and_optimizers():
    moved, scales = one_rank(train_two_models)
    assert moved == [True, False]
    assert scales == [2.0**16, 2.0**15]


def train_with_schedule(first):
    model = net()
    optimizer = sgd(model, lr=1.0)
    warnings.simplefilter("error")
    if first:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    if not first:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ((images, targets),) = batches(1)
    rates = []
    for factor in (1e38, 1.0):
        before = losses_and_state([], model)[1]["4.weight"]
        rates.append(optimizer.param_groups[0]["lr"])
        step(model, optimizer, images, targets, factor)
        schedule.step()
        rates.append(torch.equal(before, model.state_dict()["4.weight"]))
    return rates


@pytest.mark.parametrize("first", [True, False])
def test_amp_lr_scheduler_before_or_after_initialize(first):
    assert one_rank(train_with_schedule, first) == [1.0, True, 0.5, False]


def train_with_added_layer():
    """Add a layer to the optimizer later; return the state of its masters."""
    model = net()
    optimizer = torch.optim.SGD(model[6].parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    ((images, targets),) = batches(1)
    step(model, optimizer, images, targets)
    model.zero_grad()
    optimizer.add_param_group({"params": model[4].parameters()})
    step(model, optimizer, images, targets)
    kinds = {p.dtype for p in amp.master_params(optimizer)}
    return kinds, torch.equal(model[4].weight, net()[4].weight.half()), model[4].weight.dtype


def test_amp_add_param_group():
    assert one_rank(train_with_added_layer) == ({torch.float32}, False, torch.float16)


def returned_types():
    def types_of(models, optimizers, **keywords):
        result = amp.initialize(models, optimizers, **keywords)
        if not isinstance(result, tuple):
            return type(result).__name__
        return [type(thing).__name__ for thing in result]

    one, two = net(), net()
    yield types_of(one, sgd(one), opt_level="O1", loss_scale="128.0")
    yield amp.state_dict()["loss_scaler0"]["loss_scale"]
    yield types_of([one, two], sgd(one), opt_level="O1")
    yield types_of(one, [sgd(one)], opt_level="O1")
    yield types_of([one], [sgd(one)], opt_level="O1")
    yield types_of(net(), None, opt_level="O2", keep_batchnorm_fp32="False")
    yield types_of([net()], None, opt_level="O2")
    yield types_of(one, sgd(one), enabled=False)
    loss = torch.ones(())
    with amp.scale_loss(loss, None) as scaled_loss:
        yield scaled_loss is loss
    yield amp.state_dict()


def list_results(function):
    return list(function())


def test_amp_initialize_returns_the_types_of_its_arguments():
    assert one_rank(list_results, returned_types) == [
        *(["Sequential", "SGD"], 128.0, ["list", "SGD"], ["Sequential", "list"], ["list", "list"]),
        *("Sequential", "list", ["Sequential", "SGD"], True, {}),
    ]


def record_dtypes():
    seen = []

    class Probe(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append((x.dtype, y.dtype, self.weight.dtype))
            if x.shape[0] == 3:
                raise RuntimeError("the error of the model")
            return {"logits": y, "count": len(x)}

    for level in ("O0", "O1", "O2", "O3"):
        model = amp.initialize(Probe(2, 2), opt_level=level)
        out = copy.deepcopy(model)(torch.ones(1, 2, dtype=torch.float64 if level == "O0" else None))
        seen.append(out["logits"].dtype)
        with contextlib.suppress(RuntimeError):
            model(torch.ones(3, 2))
        assert not torch.is_autocast_enabled("cpu")
    model = amp.initialize(
        Probe(2, 2), opt_level="O1", patch_torch_functions=False, cast_model_outputs=torch.float64
    )
    seen.append(model(torch.ones(1, 2))["logits"].dtype)
    return [entry for entry in seen if not isinstance(entry, tuple)], seen[0], seen[3], seen[6]


def test_amp_input_and_output_dtypes_by_opt_level():
    half, single = torch.float16, torch.float32
    outputs, *inside = one_rank(record_dtypes)
    assert outputs == [single] * 4 + [torch.float64]
    assert inside == [(single, single, single), (single, half, single), (half, half, half)]


def wrap_in_dataparallel():
    return nn.DataParallel(net())


def step_without_unscale():
    model, optimizer = initialize("O2")
    ((images, targets),) = batches(1)
    step(model, optimizer, images, targets, delay_unscale=True)


def scale_unknown_loss(**keywords):
    _, optimizer = initialize("O1")
    with amp.scale_loss(torch.ones(()), optimizer, **keywords):
        pass


def scale_unknown_optimizer():
    initialize("O1")
    with amp.scale_loss(torch.ones(()), sgd(net())):
        pass


def load_unknown_state():
    initialize("O1")
    amp.load_state_dict({"model": {}})


MISTAKES = {
    "amp.state_dict() before amp.initialize()": ("HT413", amp.state_dict),
    "amp.scale_loss(…, delay_overflow_check=True)": (
        "HT415",
        lambda: scale_unknown_loss(delay_overflow_check=True),
    ),
    "amp.initialize(…, num_losses=0)": ("HT414", lambda: initialize("O1", num_losses=0)),
    "opt_level='02'": ("HT414", lambda: initialize("02")),
    "keep_batchnorm_fp32=True with opt_level O1": (
        "HT414",
        lambda: initialize("O1", keep_batchnorm_fp32=True),
    ),
    "keep_batchnorm_fp32='yes' with opt_level O2": (
        "HT414",
        lambda: initialize("O2", keep_batchnorm_fp32="yes"),
    ),
    "master_weights=True with opt_level O1": (
        "HT414",
        lambda: initialize("O1", master_weights=True),
    ),
    "patch_torch_functions=True with opt_level O2": (
        "HT414",
        lambda: initialize("O2", patch_torch_functions=True),
    ),
    "cast_model_type=torch.bfloat16 with opt_level O2": (
        "HT414",
        lambda: initialize("O2", cast_model_type=torch.bfloat16),
    ),
    "loss_scale='fast'": ("HT414", lambda: initialize("O2", loss_scale="fast")),
    "loss_scale=0": ("HT414", lambda: initialize("O2", loss_scale=0)),
    "amp.initialize() got models of type str": ("HT413", lambda: amp.initialize("model")),
    "amp.initialize() got optimizers of type StepLR": (
        "HT413",
        lambda: amp.initialize(net(), torch.optim.lr_scheduler.StepLR(sgd(net()), 1)),
    ),
    "amp.initialize() got a model wrapped in DataParallel": (
        "HT413",
        lambda: amp.initialize(wrap_in_dataparallel()),
    ),
    "amp.initialize() got a Sequential with 0.weight in half precision": (
        "HT404",
        lambda: amp.initialize(net().half()),
    ),
    "amp.initialize() got the same SGD again": (
        "HT413",
        lambda: amp.initialize(*initialize("O1")),
    ),
    "optimizer.step() after amp.scale_loss(…, delay_unscale=True)": ("HT416", step_without_unscale),
    "optimizer.step(closure) under amp": ("HT415", lambda: initialize("O1")[1].step(lambda: 1.0)),
    "amp.scale_loss(…, loss_id=1)": ("HT414", lambda: scale_unknown_loss(loss_id=1)),
    "amp.scale_loss() got a SGD that is not from amp.initialize()": (
        "HT413",
        scale_unknown_optimizer,
    ),
    "amp.load_state_dict() got model": ("HT417", load_unknown_state),
    "FusedAdam(…, amsgrad=True)": (
        "HT415",
        lambda: apex.optimizers.FusedAdam(net().parameters(), amsgrad=True),
    ),
    "optimizer.step(closure) with LARC": (
        "HT415",
        lambda: apex.parallel.LARC(sgd(net())).step(lambda: 1.0),
    ),
    "FusedSGD(…, wd_after_momentum=True)": (
        "HT415",
        lambda: apex.optimizers.FusedSGD(net().parameters(), 0.1, wd_after_momentum=True),
    ),
    "DistributedDataParallel(…, gradient_average=False)": (
        "HT415",
        lambda: apex.parallel.DistributedDataParallel(net(), gradient_average=False),
    ),
    "DistributedDataParallel(…, retain_allreduce_buffers=True)": (
        "HT415",
        lambda: apex.parallel.DistributedDataParallel(net(), retain_allreduce_buffers=True),
    ),
}


def error_of(found):
    with pytest.raises(UsageError) as caught:
        MISTAKES[found][1]()
    return caught.value.found, caught.value.code, caught.value.fixes


def errors():
    for found in MISTAKES:
        yield error_of(found)


def test_amp_wrong_use_is_an_error_with_a_fix():
    results = one_rank(list_results, errors)  # the first one before amp.initialize
    codes = [(found, code) for found, (code, _) in MISTAKES.items()]
    assert [(found, code) for found, code, _ in results] == codes
    assert all(fixes for *_, fixes in results)


def compare_with_torch():
    kinds = apex.optimizers
    pairs = [
        (kinds.FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        (
            *(kinds.FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}),
            *(torch.optim.Adam, {"weight_decay": 0.1}),
        ),
        (
            kinds.FusedSGD,
            {"lr": 0.1, "momentum": 0.9},
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9},
        ),
    ]
    for fused, given, plain_kind, same_as in pairs:
        weights = []
        for kind, keywords in ((fused, given), (plain_kind, same_as)):
            model = net()
            optimizer = kind(model.parameters(), **keywords)
            model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
            for batch in batches(3):
                step(model, optimizer, *batch)
            weights.append(torch.cat([v.flatten() for v in amp.master_params(optimizer)]).detach())
        yield fused.__name__, (weights[0] - weights[1]).abs().max().item()


def test_fused_optimizers_equal_those_of_torch():
    differences = one_rank(list_results, compare_with_torch)
    assert [name for name, _ in differences] == ["FusedAdam", "FusedAdam", "FusedSGD"]
    assert max(difference for _, difference in differences) < 1e-5


def resume_from_apex():
    """Resume from a state as Apex saved it: steps in the groups, and fewer settings."""
    saved = ("params", "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")
    for kind in (apex.optimizers.FusedAdam, apex.optimizers.FusedLAMB, apex.optimizers.FusedSGD):
        options = {"momentum": 0.9} if "SGD" in kind.__name__ else {"weight_decay": 0.1}
        weights = []
        for interrupted in (False, True):
            model = net()
            optimizer = kind(model.parameters(), lr=0.01, **options)
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
            for number, batch in enumerate(batches(4)):
                if interrupted and number == 2:
                    state = optimizer.state_dict()
                    (group,) = state["param_groups"]
                    group = {name: group[name] for name in saved if name in group}
                    if "SGD" not in kind.__name__:
                        group["step"] = 2
                        for entry in state["state"].values():
                            del entry["step"]
                    optimizer = kind(model.parameters(), lr=1.0)
                    optimizer.load_state_dict({**state, "param_groups": [group]})
                    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
                step(model, optimizer, *batch)
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        yield kind.__name__, torch.equal(*weights)


def test_fused_optimizers_load_state_of_apex():
    names = ("FusedAdam", "FusedLAMB", "FusedSGD")
    assert one_rank(list_results, resume_from_apex) == [(name, True) for name in names]


RATE, DECAY, TRUST, EPS = 0.1, 0.01, 0.02, 1e-8


def larc_by_hand(weight, gradient, clip):
    """Return the weights after a step of plain SGD with LARC, in Python's own numbers."""

    def norm(numbers):
        return math.sqrt(sum(number * number for number in numbers))

    rate = RATE
    if norm(weight) and norm(gradient):
        ratio = TRUST * norm(weight) / (norm(gradient) + DECAY * norm(weight) + EPS)
        rate = min(ratio, RATE) if clip else ratio * RATE
        gradient = [g + DECAY * w for w, g in zip(weight, gradient, strict=True)]
    return [w - rate * g for w, g in zip(weight, gradient, strict=True)]


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    ("weight", "gradient"),
    [
        ([3.0, -4.0], [0.6, 0.8]),  # λ is close to the rate
        ([3.0, -4.0], [0.006, 0.008]),  # λ is above the rate
        ([0.3, -0.4], [60.0, 80.0]),  # λ is far below the rate
        ([0.0, 0.0], [0.6, 0.8]),
        ([3.0, -4.0], [0.0, 0.0]),
    ],
)
def test_larc_takes_the_step_of_its_formula(weight, gradient, clip):
    layer, fixed = (nn.Parameter(torch.tensor(weight, dtype=torch.float64)) for _ in range(2))
    sgd = torch.optim.SGD([layer, fixed], RATE, weight_decay=DECAY)
    optimizer = apex.parallel.LARC(sgd, trust_coefficient=TRUST, clip=clip, eps=EPS)
    layer.grad = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()
    assert layer.tolist() == pytest.approx(larc_by_hand(weight, gradient, clip), rel=1e-12)
    assert fixed.tolist() == weight  # without a gradient
    assert optimizer.param_groups[0]["weight_decay"] == DECAY


def train_with_larc():
    """Train as self-supervised scripts do; return the losses, and the rate and decay at the end."""
    from hpctrain.compat.apex.parallel.LARC import LARC

    model = net()
    optimizer = LARC(optimizer=sgd(model, lr=0.5), trust_coefficient=0.1, clip=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optim, 3, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    losses = []
    for batch in batches():
        losses.append(step(model, optimizer, *batch))
        schedule.step()
    (group,) = optimizer.param_groups
    return losses, group["lr"], group["weight_decay"]


def test_larc_under_amp_with_a_schedule():
    losses, rate, decay = one_rank(train_with_larc)
    assert losses[-1] < 0.9 * losses[0]
    assert (rate, decay) == (0.125, 1e-4)


def test_arguments_that_apex_does_not_have_are_refused():
    for call in (
        lambda: apex.optimizers.FusedAdam(net().parameters(), amsgad=True),
        lambda: apex.parallel.DistributedDataParallel(net(), mesage_size=1),
        lambda: amp.initialize(net(), opt_level="O2", keep_batchnorm=True),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()


def step_without_gradients():
    models = [net(0), net(1)]
    optimizers = [sgd(model) for model in models]
    amp.initialize(models, optimizers, opt_level="O2")
    ((images, targets),) = batches(1)
    for _ in range(2):
        loss = F.cross_entropy(models[0](images), targets)
        with amp.scale_loss(loss, optimizers[1]) as scaled_loss:
            scaled_loss.backward()
        optimizers[1].step()
    return torch.equal(models[1].state_dict()["4.weight"], net(1)[4].weight)


def test_amp_optimizer_without_gradients():
    assert one_rank(step_without_gradients)


def test_convert_syncbn_model_refused_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU") as caught:
        apex.parallel.convert_syncbn_model(net())
    assert caught.value.code == "HT408"


# As in NVIDIA's example, except the imports and `.cuda()`.
SCRIPT = """
import os
import torch
import torch.nn as nn
from hpctrain.compat.apex import amp
from hpctrain.compat.apex.parallel import DistributedDataParallel as DDP
from hpctrain.data import digits
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

torch.distributed.init_process_group("gloo", init_method="env://")
rank = torch.distributed.get_rank()
torch.manual_seed(rank)  # it is DDP that makes the weights equal
train_set, _ = digits()
sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
                      nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
model = DDP(model, delay_allreduce=True)
criterion = nn.CrossEntropyLoss()
start = 0
if os.path.exists("checkpoint.pth.tar"):
    checkpoint = torch.load("checkpoint.pth.tar")
    start = checkpoint["epoch"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
torch.distributed.barrier()

losses = []
for epoch in range(start, start + 1):
    sampler.set_epoch(epoch)
    for input, target in train_loader:
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(),
                    "optimizer": optimizer.state_dict(), "amp": amp.state_dict()},
                   "checkpoint.pth.tar")
masters = [p.detach().clone() for p in amp.master_params(optimizer)]
torch.distributed.destroy_process_group()
"""


def set_torchrun_variables(port):
    """Set the variables of torchrun."""
    names = {"RANK": "HPCTRAIN_RANK", "WORLD_SIZE": "HPCTRAIN_WORLD_SIZE"}
    os.environ.update({name: os.environ[own_name] for name, own_name in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")


def run_train_py(port):
    set_torchrun_variables(port)
    values = runpy.run_path("train.py")
    return values["losses"], values["masters"]


def free_port():
    """Return a free port below the system's range for outgoing connections."""
    for port in range(10_000 + os.getpid() % 10_000, 32_768):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def test_apex_imagenet_script_trains_on_three_ranks_and_resumes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    first = ranks.values(ranks.run(3, run_train_py, free_port()))
    second = ranks.values(ranks.run(3, run_train_py, free_port()))
    for results in (first, second):
        for _, masters in results[1:]:
            assert all(map(torch.equal, masters, results[0][1]))
    begin, end = first[0][0][0], second[0][0][-1]
    assert end < 0.3 * begin
    assert second[0][0][0] < 0.7 * begin
    state = torch.load("checkpoint.pth.tar", weights_only=True)
    assert all(name.startswith("module.") for name in state["state_dict"])
    assert {v.dtype for v in state["state_dict"].values()} == {torch.float32, torch.int64}
    assert state["amp"]["loss_scaler0"].keys() == {"loss_scale", "unskipped"}
    assert state["epoch"] == 2


def wrap_in_ddp(port):
    """Load weights beyond half precision on rank 0, then wrap in DDP; return the masters."""
    set_torchrun_variables(port)
    torch.distributed.init_process_group("gloo")
    model, optimizer = initialize("O2", seed=torch.distributed.get_rank())
    if torch.distributed.get_rank() == 0:
        model.load_state_dict({name: v + v / 3 for name, v in net(5).state_dict().items()})
    ddp = apex.parallel.DistributedDataParallel(model)
    ((images, targets),) = batches(1)
    step(ddp, optimizer, images, targets)
    torch.distributed.destroy_process_group()
    return [p.detach() for p in amp.master_params(optimizer)]


def test_apex_ddp_broadcasts_master_weights_of_rank_0():
    first, *others = ranks.values(ranks.run(3, wrap_in_ddp, free_port()))
    assert all(all(map(torch.equal, first, other)) for other in others)


def ddp_warnings(port):
    set_torchrun_variables(port)
    torch.distributed.init_process_group("gloo")
    model = amp.initialize(net(), opt_level="O2")
    with captured_log() as messages:
        apex.parallel.DistributedDataParallel(model, message_size=1, num_allreduce_streams=2)
        assert not messages
        apex.parallel.DistributedDataParallel(
            model, allreduce_always_fp32=True, gradient_predivide_factor=2.0
        )
    torch.distributed.destroy_process_group()
    return messages


def test_apex_ddp_warns_about_arguments_that_change_numbers():
    messages = one_rank(ddp_warnings, free_port())
    assert [re.search(r"…, (\w+)", message)[1] for message in messages] == [
        "allreduce_always_fp32",
        "gradient_predivide_factor",
    ]


def test_apex_itself_is_never_imported():
    folder = Path(apex.__file__).parent
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert not re.search(r"^\s*(import|from) apex", text, re.MULTILINE)
