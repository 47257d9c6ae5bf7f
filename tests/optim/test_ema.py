"""EMA: the average of weights against its formula, and the swap of weights and averages."""

from fractions import Fraction

import pytest
import torch
from torch import nn

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.optim import EMA


class Net(nn.Module):
    """A model with the buffers of batch norm, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.norm(self.first(x)) + self.second(x)


def change_weights(model, seed):
    """Change the weights as an optimizer's step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype))


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999])
def test_ema_follows_its_formula(decay):
    model = Net().double()
    ema = EMA([model], decay)
    names = [name for name, _ in model.named_parameters()]
    exact = {
        name: list(map(Fraction, model.get_parameter(name).flatten().tolist())) for name in names
    }
    for step in range(50):
        change_weights(model, step)
        ema.update()
        for name in names:
            weights = map(Fraction, model.get_parameter(name).flatten().tolist())
            exact[name] = [
                Fraction(decay) * average + (1 - Fraction(decay)) * weight
                for average, weight in zip(exact[name], weights, strict=True)
            ]
    (averages,) = ema.state_dict()["averages"]
    assert averages.keys() == set(names)
    for name in names:
        size = max(map(abs, exact[name]))
        for got, wanted in zip(averages[name].flatten().tolist(), exact[name], strict=True):
            # 50 steps, each with a rounding error of at most one unit in the last place.
            assert abs(Fraction(got) - wanted) <= 50 * Fraction(2) ** -52 * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ema_of_half_models_is_fp32(dtype):
    model = nn.Linear(4, 3).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = EMA([model], 0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(10):
        ema.update()
    (averages,) = ema.state_dict()["averages"]
    assert averages["weight"].dtype == torch.float32
    # In half precision, 1 + 0.001 is 1 (bf16), or rounded at each step (fp16).
    assert averages["weight"] == pytest.approx(torch.full((3, 4), 2 - 0.999**10), rel=1e-6)
    with ema.swapped():
        assert model.weight.dtype == dtype
        assert torch.equal(model.weight, averages["weight"].to(dtype))


def test_ema_averages_its_source():
    model = nn.Linear(2, 2, bias=False).half()
    masters = {model.weight: model.weight.detach().float()}
    ema = EMA([model], 0.5, source=masters.__getitem__)
    masters[model.weight] = masters[model.weight] + 1e-5  # too small for half precision
    ema.update()
    (averages,) = ema.state_dict()["averages"]
    torch.testing.assert_close(
        averages["weight"], model.weight.detach().float() + 0.5e-5, rtol=0, atol=1e-7
    )


def test_ema_swap_is_undone_after_an_error():
    model, other = Net(), nn.Linear(2, 2).double()
    ema = EMA([model, other], 0.9)
    averages = [state_of(model), state_of(other)]
    change_weights(model, 1)
    change_weights(other, 2)
    model(torch.randn(8, 4))
    before = [state_of(model), state_of(other)]
    storage = [p.data_ptr() for p in model.parameters()]
    with ema.swapped():
        for name, value in model.named_parameters():
            assert torch.equal(value, averages[0][name])
        assert_same(state_of(other), averages[1])
        # The buffers are the current ones.
        assert torch.equal(model.norm.running_mean, before[0]["norm.running_mean"])
        model(torch.randn(8, 4))
        assert not torch.equal(model.norm.running_mean, before[0]["norm.running_mean"])
    assert_same(state_of(model), before[0])
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    assert_same(state_of(model), before[0])
    assert_same(state_of(other), before[1])
    assert [p.data_ptr() for p in model.parameters()] == storage


def test_ema_swap_refuses_another_swap_and_updates():
    model = nn.Linear(2, 2)
    ema = EMA([model], 0.9)
    with ema.swapped():
        with pytest.raises(UsageError, match="swapped") as twice, ema.swapped():
            pass
        with pytest.raises(UsageError, match="update") as inside:
            ema.update()
    assert [caught.value.code for caught in (twice, inside)] == ["HT409", "HT409"]
    with ema.swapped():
        pass
    ema.update()


def test_ema_state_round_trip(tmp_path):
    models = [Net(), nn.Linear(2, 2).double()]
    ema = EMA(models, 0.9)
    for step in range(3):
        for model in models:
            change_weights(model, step)
        ema.update()
    torch.save(ema.state_dict(), tmp_path / "ema.pt")
    twins = [Net(), nn.Linear(2, 2).double()]
    resumed = EMA(twins, 0.9)
    resumed.load_state_dict(torch.load(tmp_path / "ema.pt", weights_only=True))
    for got, wanted in zip(
        resumed.state_dict()["averages"], ema.state_dict()["averages"], strict=True
    ):
        assert_same(got, wanted)
    # Both continue equally.
    for model, twin in zip(models, twins, strict=True):
        twin.load_state_dict(model.state_dict())
        change_weights(model, 7)
        change_weights(twin, 7)
    ema.update()
    resumed.update()
    assert_same(resumed.state_dict()["averages"][0], ema.state_dict()["averages"][0])


def test_ema_of_shared_weights():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    ema = EMA([first, second], 0.5)
    start = first.weight.detach().clone()
    change_weights(first, 3)
    ema.update()
    one, two = ema.state_dict()["averages"]
    assert one["weight"] is two["weight"]
    torch.testing.assert_close(one["weight"], (start + first.weight.detach()) / 2)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([nn.Linear(2, 3)], r"weight of model 0 is \(3, 2\), not \(2, 2\)"),
        ([nn.Linear(2, 2, bias=False)], r"bias of model 0 is missing, not \(2,\)"),
        ([nn.Linear(2, 2), nn.Linear(2, 2)], r"weight of model 1 is \(2, 2\), not there"),
    ],
)
def test_ema_of_other_models_is_refused(models, message):
    ema = EMA([nn.Linear(2, 2)], 0.9)
    before = {name: value.clone() for name, value in ema.state_dict()["averages"][0].items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        ema.load_state_dict(EMA(models, 0.9).state_dict())
    assert caught.value.code == "HT405"
    assert_same(ema.state_dict()["averages"][0], before)


def test_ema_restart():
    model = nn.Linear(2, 2)
    ema = EMA([model], 0.9)
    change_weights(model, 1)
    ema.restart()
    assert_same(ema.state_dict()["averages"][0], dict(model.named_parameters()))


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_invalid_ema_decay_is_refused(decay):
    with pytest.raises(UsageError, match="decay") as caught:
        EMA([nn.Linear(2, 2)], decay)
    assert caught.value.code == "HT406"


def test_ema_leaves_integer_parameters_alone():
    model = nn.Linear(2, 2)
    model.counter = nn.Parameter(torch.tensor([3]), requires_grad=False)
    ema = EMA([model], 0.9)
    ema.update()
    assert ema.state_dict()["averages"][0].keys() == {"weight", "bias"}
    with ema.swapped():
        assert model.counter.item() == 3
