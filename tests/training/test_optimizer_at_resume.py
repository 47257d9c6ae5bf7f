"""A resume with the optimizer's parameters in another order, or with another optimizer."""

from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from battery import session
from torch import nn

from hpctrain.errors import UsageError

SIZE = pytest.mark.parametrize(
    ("backend", "size"), [("auto", 1), ("auto", 2), ("fsdp", 2), ("horovod", 2)]
)


def adam(groups):
    return torch.optim.AdamW(groups, 0.05)


def decayed(groups):
    return torch.optim.AdamW(groups, 0.05, weight_decay=0.3)


def sgd(groups):
    return torch.optim.SGD(groups, 0.05, 0.9)


def of_layers(*groups):
    """Return a function that makes groups of layers by their numbers, each with its own decay."""
    return partial(groups_of, groups)


def groups_of(groups, layers):
    return [
        {"params": [layers[number].weight for number in group], "weight_decay": 0.1 * min(group)}
        for group in groups
    ]


def one_group(layers):
    return [layer.weight for layer in layers]


def train(make, groups, steps, resume=False):
    """Train four equal layers; return their weights and the states of the optimizer."""
    torch.manual_seed(1)
    with session(
        batch_size=2, max_steps=steps, precision="fp64", deterministic=True, run_dir="run",
        resume=resume,
    ) as opened:  # fmt: skip
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))).double()
        optimizer = make(groups(list(model)))
        model, optimizer = opened.prepare(model, optimizer)
        x = torch.arange(8, dtype=torch.float64).reshape(2, 4) / 8
        with opened.run() as run:
            for step in run.steps(6):
                opened.step((model(x) - step).pow(2).mean())
        whole = [opened.backend.whole(layer.weight.detach()) for layer in model]
        return torch.cat([one.flatten() for one in whole]).tolist()


@SIZE
@pytest.mark.parametrize(
    "again",
    [of_layers((3, 2, 1, 0)), of_layers((2, 0, 3, 1))],
    ids=["reversed", "mixed"],
)
def test_states_go_to_their_parameters_whatever_their_order(
    backend, size, again, tmp_path, monkeypatch
):
    first, run = of_layers((0, 1, 2, 3)), partial(ranks.run, size, env={"TEST_BACKEND": backend})
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = ranks.values(run(partial(train, adam, first, 6)))
    monkeypatch.chdir(tmp_path)
    ranks.values(run(partial(train, adam, first, 3)))
    assert ranks.values(run(partial(train, adam, again, 6, resume=True))) == whole


def test_settings_of_groups_stay_with_their_parameters(tmp_path, monkeypatch):
    first, again = of_layers((0, 1), (2, 3)), of_layers((3, 2), (1, 0))
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = ranks.values(ranks.run(1, partial(train, adam, first, 6)))
    monkeypatch.chdir(tmp_path)
    ranks.values(ranks.run(1, partial(train, adam, first, 3)))
    assert ranks.values(ranks.run(1, partial(train, adam, again, 6, resume=True))) == whole


@pytest.mark.parametrize(
    ("make", "groups", "message"),
    [
        (sgd, of_layers((0, 1), (2, 3)), "has the states of AdamW, and the script prepared SGD"),
        (adam, of_layers((0, 2), (1, 3)), "the groups of the AdamW have other parameters than"),
    ],
)
def test_other_optimizer_or_group_is_refused_and_loses_nothing(make, groups, message):
    ranks.values(ranks.run(2, partial(train, adam, of_layers((0, 1), (2, 3)), 3)))
    for result in ranks.run(2, partial(train, make, groups, 6, resume=True)):
        assert isinstance(result, UsageError)
        assert message in str(result)
    again = partial(train, adam, of_layers((0, 1), (2, 3)), 6, resume=True)
    ranks.values(ranks.run(2, again))


def test_settings_that_the_checkpoint_keeps_are_named():
    ranks.values(ranks.run(1, partial(train, decayed, one_group, 3)))
    ranks.values(ranks.run(1, partial(train, adam, one_group, 6, resume=True)))
    log = Path("run/logs/rank-0.log").read_text()
    assert "the AdamW keeps the settings of the checkpoint: weight_decay=0.3 (here 0.01)" in log


def train_sparse(steps, resume=False):
    """Train an embedding with sparse gradients; return its weights."""
    with session(batch_size=4, max_steps=steps, run_dir="run", resume=resume) as opened:
        model = torch.nn.Embedding(20, 3, sparse=True)
        model, _ = opened.prepare(model, torch.optim.SparseAdam(model.parameters(), 0.1))
        with opened.run() as run:
            for _ in run.epochs():
                for indices in run.batches(opened.loader(torch.arange(120) % 20)):
                    opened.step(model(indices).sum(1).sub(1).pow(2).mean())
        return model.weight.detach().clone()


def test_sparse_adam_resumes(tmp_path, monkeypatch):
    expected = ranks.values(ranks.run(3, train_sparse, 6))
    (tmp_path / "cut").mkdir()
    monkeypatch.chdir(tmp_path / "cut")
    ranks.values(ranks.run(3, train_sparse, 3))
    found = ranks.values(ranks.run(3, train_sparse, 6, True))
    assert all(map(torch.equal, found, expected))
