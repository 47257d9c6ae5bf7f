"""FusedLAMB's stand-in against its formula, written out for one parameter at a time."""

import copy
import math

import pytest
import torch
import torch._dynamo  # else the first optimizer of a test imports it and sets a variable
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain.compat.apex.lamb import LAMB
from hpctrain.errors import UsageError

SHAPES = ((5, 4), (4,), (), (2, 3, 2))


def lamb(
    groups,
    gradients,
    betas=(0.9, 0.999),
    eps=1e-6,
    bias_correction=True,
    adam_w_mode=True,
    grad_averaging=True,
    max_grad_norm=1.0,
    use_nvlamb=False,
):
    """Return the weights after one step of LAMB for each list of gradients.

    Args:
        groups: (weights, lr, decay).
        gradients: by step; None for a parameter without one.
        others: settings of the optimizer.
    """
    (beta1, beta2), moments = betas, {}
    for step in gradients:
        rest = iter(step)
        norm = sum(g.square().sum().item() for g in step if g is not None) ** 0.5
        excess = max(1.0, norm / max_grad_norm)
        for number, (weights, lr, decay) in enumerate(groups):
            for place, weight in enumerate(weights):
                gradient = next(rest)
                if gradient is None:
                    continue
                gradient = gradient / excess
                if not adam_w_mode:
                    gradient = gradient + decay * weight
                t, m, v = moments.get((number, place), (0, torch.zeros(()), torch.zeros(())))
                t += 1
                m = beta1 * m + (1 - beta1 if grad_averaging else 1) * gradient
                v = beta2 * v + (1 - beta2) * gradient**2
                moments[number, place] = t, m, v
                c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1, 1)
                update = (m / c1) / ((v / c2).sqrt() + eps)
                if adam_w_mode:
                    update = update + decay * weight
                w, u = weight.norm().item(), update.norm().item()
                ratio = w / u if (decay or use_nvlamb) and w and u else 1.0
                weights[place] = weight - lr * ratio * update
    return [weight for weights, *_ in groups for weight in weights]


def first_weights(seed=0, dtype=torch.float64):
    """Return the weights of two groups, of the shapes above and a tensor of zeros each."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        for _ in range(2)
    ]
    for group in weights:
        group.append(torch.zeros(3, dtype=torch.float64))
    return [[weight.to(dtype) for weight in group] for group in weights]


def gradients_of_steps(steps=25, seed=1):
    """Return the gradients of each step; some are zeros, and some parameters have none."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [*SHAPES, (3,)] * 2
    all_steps = []
    for step in range(steps):
        gradients = [
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
        ]
        gradients[step % len(shapes)].zero_()
        gradients[(step * 3 + 1) % len(shapes)] = None
        all_steps.append(gradients)
    return all_steps


def train(make, weights, gradients):
    """Return an optimizer after steps with these gradients; lr 0.1 and 0.02, decay 0.05 and 0."""
    groups = [
        {"params": [nn.Parameter(weight.clone()) for weight in group], "lr": lr, "weight_decay": d}
        for group, lr, d in zip(weights, (0.1, 0.02), (0.05, 0.0), strict=True)
    ]
    optimizer = make(groups)
    take_steps(optimizer, gradients)
    return optimizer


def take_steps(optimizer, gradients):
    for step in gradients:
        for parameter, gradient in zip(parameters(optimizer), step, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        optimizer.step()


def parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def expected_weights(formula, weights, gradients, **settings):
    groups = zip(weights, (0.1, 0.02), (0.05, 0.0), strict=True)
    return formula([(list(group), lr, d) for group, lr, d in groups], gradients, **settings)


def assert_near(optimizer, expected, tolerance=1e-12):
    for got, wanted in zip(parameters(optimizer), expected, strict=True):
        scale = max(1.0, wanted.abs().max().item())
        assert (got.detach() - wanted).abs().max().item() <= tolerance * scale


SETTINGS = [
    {},
    {"betas": (0.0, 0.5), "eps": 0.01},
    {"bias_correction": False},
    {"adam_w_mode": False},
    {"grad_averaging": False},
    {"max_grad_norm": 3.0},
    {"max_grad_norm": 1e3},
    {"use_nvlamb": True},
    {"adam_w_mode": False, "bias_correction": False, "max_grad_norm": math.inf, "use_nvlamb": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_lamb_follows_its_formula(settings):
    weights, gradients = first_weights(), gradients_of_steps()
    optimizer = train(lambda groups: LAMB(groups, **settings), weights, gradients)
    assert_near(optimizer, expected_weights(lamb, weights, gradients, **settings))


def test_lamb_without_decay_is_adam():
    weights = [weight for group in first_weights() for weight in group]
    gradients = [
        [torch.zeros_like(w) if g is None else g for g, w in zip(step, weights, strict=True)]
        for step in gradients_of_steps()
    ]
    settings = {"lr": 0.03, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8}
    own = LAMB([nn.Parameter(w.clone()) for w in weights], max_grad_norm=math.inf, **settings)
    adam = torch.optim.Adam([nn.Parameter(w.clone()) for w in weights], **settings)
    take_steps(own, gradients)
    take_steps(adam, gradients)
    assert_near(own, [parameter.detach() for parameter in parameters(adam)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lamb_compute_half_weights_in_fp32(dtype):
    # The squares of numbers of size 1000 and of gradients of size 1e-5 are out of the range of half
    # precision. Only the change of a step is rounded to half precision.
    weight = nn.Parameter((1000 * torch.ones(300, 300)).to(dtype))
    slope = torch.full((300, 300), 1e-5).to(dtype)
    half = LAMB([{"params": [weight], "lr": 0.5, "weight_decay": 0.01}])
    weight.grad = slope.clone()
    wide = nn.Parameter(weight.detach().float())
    full = LAMB([{"params": [wide], "lr": 0.5, "weight_decay": 0.01}])
    wide.grad = slope.float()
    half.step()
    full.step()
    assert weight.dtype == dtype
    assert torch.equal(weight.detach(), wide.detach().to(dtype))
    for name, value in full.state[wide].items():
        state = half.state[weight][name]
        assert torch.equal(torch.as_tensor(state), torch.as_tensor(value)), name
        assert not isinstance(state, torch.Tensor) or state.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lamb_resume_bit_for_bit(dtype, tmp_path):
    weights, gradients = first_weights(dtype=dtype), gradients_of_steps()
    uninterrupted = train(LAMB, weights, gradients)
    first = train(LAMB, weights, gradients[:12])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    halfway = [[p.detach().clone() for p in group["params"]] for group in first.param_groups]
    second = train(LAMB, halfway, [])
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    loaded = second.state_dict()
    torch.testing.assert_close(loaded, first.state_dict(), rtol=0, atol=0)
    take_steps(second, gradients[12:])
    for got, wanted in zip(parameters(second), parameters(uninterrupted), strict=True):
        assert torch.equal(got, wanted)


def test_lamb_skip_parameters_without_gradient():
    still, moved = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = LAMB([still, moved])
    optimizer.step()
    assert not optimizer.state
    moved.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(still, torch.ones(3))
    assert list(optimizer.state) == [moved]
    assert not torch.equal(moved, torch.ones(3))


def test_lamb_take_a_closure():
    weight = nn.Parameter(torch.ones(3))
    optimizer = LAMB([weight])
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert optimizer.step(closure).item() < 3.0
    assert len(calls) == 2


def test_lamb_leaves_gradients_unchanged():
    weight = nn.Parameter(torch.randn(4, 4))
    weight.grad = torch.randn(4, 4)
    before = weight.grad.clone()
    LAMB([weight], weight_decay=0.1, adam_w_mode=False, max_grad_norm=0.1).step()
    assert torch.equal(weight.grad, before)


@pytest.mark.parametrize("settings", [{}, {"use_nvlamb": True}])
def test_lamb_does_not_sync_the_device(settings):
    # A fake tensor has no values: `if` and `.item()`, which read one, raise an error.
    with FakeTensorMode():
        dtypes = (torch.float32, torch.float16, torch.float64)
        groups = [
            {
                "params": [nn.Parameter(torch.randn(4, 4, dtype=dtype)) for dtype in dtypes],
                "weight_decay": decay,
            }
            for decay in (0.1, 0.0)
        ]
        optimizer = LAMB(groups, **settings)
        for _ in range(2):
            for parameter in parameters(optimizer):
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()


def test_clipping_norm_spans_groups_and_dtypes():
    def parameter_of(dtype, size):
        parameter = nn.Parameter(torch.ones(size, dtype=dtype))
        parameter.grad = torch.full((size,), 2.0, dtype=dtype)
        return parameter

    optimizer = LAMB(
        [
            {"params": [parameter_of(torch.float32, 9), parameter_of(torch.float64, 9)]},
            {"params": [parameter_of(torch.bfloat16, 7)], "max_grad_norm": math.inf},
        ],
        max_grad_norm=1.0,
        betas=(0.0, 0.0),
    )
    optimizer.step()
    # The norm is √(25 · 4) = 10; the second group counts, but is not clipped.
    means = [optimizer.state[p]["exp_avg"][0].item() for p in parameters(optimizer)]
    assert means == pytest.approx([0.2, 0.2, 2.0])


def test_lamb_refuse_sparse_and_complex_gradients():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        LAMB(embedding.parameters()).step()
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(UsageError, match="complex") as caught:
        LAMB([wave]).step()
    assert caught.value.code == "HT407"


def test_lamb_with_deepcopy_and_torch_schedulers():
    model = nn.Linear(3, 2)
    optimizer = LAMB(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    twin_model, twin = copy.deepcopy((model, optimizer))
    for each_model, each in ((model, optimizer), (twin_model, twin)):
        each.zero_grad()
        each_model(torch.ones(1, 3)).sum().backward()
        each.step()
    assert torch.equal(model.weight, twin_model.weight)


def test_grad_scaler_skips_lamb_on_overflow():
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = LAMB([weight]), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(3))
    assert not optimizer.state
