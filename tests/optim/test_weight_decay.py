"""Weight decay of weights only: norms and biases have none, all other settings stay."""

import pytest
import torch
import torch._dynamo  # else the first optimizer of a test imports it and sets a variable
from torch import nn
from torch.optim import SGD, AdamW

from hpctrain.optim import LARS, split


class Block(nn.Module):
    """A block of a ResNet."""

    def __init__(self, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm1 = norm(3)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm2 = norm(3)

    def forward(self, x):
        return x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))


class ResNet(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3)
        self.blocks = nn.Sequential(Block(norm), Block(norm))
        self.head = nn.Linear(3, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def names_by_decay(model, optimizer):
    """Return the names of parameters with and without decay, in the order of the groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    with_decay, without = [], []
    for group in optimizer.param_groups:
        chosen = with_decay if group["weight_decay"] else without
        chosen += [names[parameter] for parameter in group["params"]]
    return with_decay, without


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d,
        nn.SyncBatchNorm,
        lambda size: nn.GroupNorm(1, size),
        lambda size: nn.InstanceNorm2d(size, affine=True),
        lambda size: nn.LayerNorm([size, 4, 4]),  # of three dimensions
        lambda size: nn.RMSNorm([size, 4, 4]),
    ],
)
def test_weight_decay_groups_of_a_resnet(norm):
    model = ResNet(norm)
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    without_decay = split(optimizer, [model])
    with_decay, without = names_by_decay(model, optimizer)
    assert with_decay == [
        "stem.weight",
        *(f"blocks.{i}.conv{j}.weight" for i in range(2) for j in (1, 2)),
        "head.weight",
    ]
    assert without == [name for name, _ in model.named_parameters() if name not in with_decay]
    assert without_decay == len(without)


def test_weight_decay_groups_of_attention_and_rnn():
    model = nn.ModuleList(
        [nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.LSTM(4, 4), nn.LayerNorm(4)]
    )
    optimizer = AdamW(model.parameters())
    assert split(optimizer, [model]) == 8
    with_decay, without = names_by_decay(model, optimizer)
    assert with_decay == [
        *("0.in_proj_weight", "0.out_proj.weight"),
        *("1.weight_ih_l0", "1.weight_hh_l0"),
    ]
    assert set(without) == {
        *("0.in_proj_bias", "0.bias_k", "0.bias_v", "0.out_proj.bias"),
        *("1.bias_ih_l0", "1.bias_hh_l0", "2.weight", "2.bias"),
    }


def test_weight_decay_of_shared_parameters():
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7)
    head.weight = embedding.weight
    odd, norm = nn.Linear(1, 4), nn.LayerNorm(4)
    norm.weight = odd.bias
    before, other, after = nn.Module(), nn.LayerNorm(3), nn.Module()
    before.weight = after.weight = other.weight
    model = nn.ModuleList([embedding, head, odd, norm, before, other, after])
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    split(optimizer, [model])
    with_decay, without = names_by_decay(model, optimizer)
    assert with_decay == ["0.weight", "2.weight"]
    assert without == ["1.bias", "2.bias", "3.bias", "4.weight", "5.bias"]


def test_weight_decay_keeps_group_settings_and_order():
    model = ResNet()
    body = [*model.stem.parameters(), *model.blocks.parameters()]
    optimizer = SGD(
        [
            {"params": body, "lr": 0.1, "initial_lr": 0.7, "mark": "body"},
            {"params": [model.head.weight], "lr": 0.2, "momentum": 0.3},
            {"params": [model.head.bias], "lr": 0.4},
        ],
        weight_decay=0.5,
    )
    before = optimizer.param_groups[0], optimizer.param_groups[2]
    assert split(optimizer, [model]) == 1 + 8 + 1
    first, second, third, fourth = groups = optimizer.param_groups
    assert (first, fourth) == before
    assert first is before[0]
    assert [group["weight_decay"] for group in groups] == [0.5, 0, 0.5, 0]
    for name in first.keys() - {"params", "weight_decay"}:
        assert first[name] == second[name]
    assert second["mark"] == "body"
    assert third["momentum"] == 0.3
    assert fourth["params"] == [model.head.bias]
    # A second split changes nothing.
    before = [dict(group) for group in groups]
    assert split(optimizer, [model]) == 0
    assert optimizer.param_groups == before


def test_groups_without_weight_decay_are_not_split():
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert split(optimizer, [model]) == 0
    assert len(optimizer.param_groups) == 1
    unknown = torch.optim.Adagrad(model.parameters(), lr=0.1)
    del unknown.param_groups[0]["weight_decay"]
    assert split(unknown, [model]) == 0
    assert "weight_decay" not in unknown.param_groups[0]


def test_weight_decay_of_parameters_without_a_model():
    vector, number, matrix = (nn.Parameter(torch.ones(shape)) for shape in ((3,), (), (1, 3)))
    optimizer = SGD([vector, matrix, number], lr=0.1, weight_decay=0.5)
    assert split(optimizer, []) == 2
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    assert optimizer.param_groups[0]["params"][0] is matrix
    assert optimizer.param_groups[1]["params"][0] is vector
    # In a model, a vector that is neither of a norm nor a bias is a weight.
    model = nn.Module()
    model.gain = nn.Parameter(torch.ones(3))
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    assert split(optimizer, [model]) == 0


def test_weight_decay_splits_names_and_rates():
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    optimizer = AdamW(model.named_parameters(), lr=rate)
    split(optimizer, [model])
    first, second = optimizer.param_groups
    assert (first["param_names"], second["param_names"]) == (["weight"], ["bias"])
    assert first["lr"] is rate
    second["lr"].fill_(0.5)
    assert rate.item() == pytest.approx(0.1)


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 1, 6, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def test_weight_decay_split_after_some_steps(tmp_path):
    model = ResNet().double()
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    step(model, optimizer, 0)
    split(optimizer, [model])
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "both.pt")
    step(model, optimizer, 1)
    twin = ResNet().double()
    again = AdamW(twin.parameters(), lr=9.0, weight_decay=0.5)
    split(again, [twin])
    weights, settings = torch.load(tmp_path / "both.pt", weights_only=True)
    twin.load_state_dict(weights)
    again.load_state_dict(settings)
    step(twin, again, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name


@pytest.mark.parametrize("taken", [0, 3])
def test_weight_decay_split_equals_hand_made_groups(taken):
    torch.manual_seed(5)
    model, twin = ResNet().double(), ResNet().double()
    twin.load_state_dict(model.state_dict())
    weights = [p for p in twin.parameters() if p.dim() > 1]
    rest = [p for p in twin.parameters() if p.dim() == 1]
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    baseline = AdamW([{"params": weights}, {"params": rest}], lr=0.01, weight_decay=0.5)
    for number in range(taken):
        step(model, optimizer, number)
        step(twin, baseline, number)
    split(optimizer, [model])
    baseline.param_groups[1]["weight_decay"] = 0.0
    for number in range(taken, taken + 3):
        step(model, optimizer, number)
        step(twin, baseline, number)
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_lars_takes_plain_steps_for_norms_and_biases():
    model = nn.Linear(3, 2).double()
    before = model.bias.detach().clone()
    optimizer = LARS(model.parameters(), 0.5, momentum=0.0, weight_decay=0.1)
    assert split(optimizer, [model]) == 1
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert torch.equal(model.bias, before - 0.5)
