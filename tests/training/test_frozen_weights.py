"""Checkpoints without frozen parameters: small, exact, and only for the same frozen weights."""

import os

import pytest
import ranks
import torch
from checkpoints import load_newest
from safetensors.torch import load_file
from torch import nn

import hpctrain
from hpctrain.checkpoint import export
from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory

BACKENDS = [
    pytest.param(1, "auto"),
    pytest.param(3, "ddp"),
    pytest.param(3, "fsdp"),
    pytest.param(3, "horovod", marks=pytest.mark.slow),
]


class LoRA(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, linear.in_features, dtype=torch.float64) / 10)
        self.up = nn.Parameter(torch.zeros(linear.out_features, 2, dtype=torch.float64))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def train(backend, run_dir="run", die_at=None, base=0, thaws=False, norm=True, **options):
    """Train adapters of a model; return all weights at the end.

    Args:
        backend, run_dir, options: of the session.
        die_at: step after which all ranks die.
        base: seed of the frozen weights.
        norm: whether the model has batch norm.
        thaws: whether the frozen weights are trained in the first two steps.
    """
    options = {"checkpoint_frozen": False, "global_batch": 6, "checkpoint_every": 1, **options}
    with hpctrain.Session(
        backend=backend, run_dir=run_dir, precision="fp64", max_steps=6, deterministic=True,
        **options,
    ) as session:  # fmt: skip
        torch.manual_seed(base)
        layers = [nn.Linear(3, 7).double(), nn.Linear(7, 1).double()]
        torch.manual_seed(9)
        model = nn.Sequential(LoRA(layers[0]), nn.Tanh(), LoRA(layers[1]))
        if norm:
            model.append(nn.BatchNorm1d(1).double())
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        model, optimizer = session.prepare(model, optimizer)
        frozen = [one for one in model.parameters() if not one.requires_grad]
        data = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)).double()
        with session.run() as run:
            for _ in run.epochs():
                for x in run.batches(session.loader(data)):
                    for one in frozen if thaws else ():
                        one.requires_grad_(run.step < 2)
                    session.step((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
                    if run.step == die_at:
                        os._exit(9)
        return session.state_dict(model)


def trained(size, *arguments, **options):
    return ranks.values(ranks.run(size, call, arguments, options))[0]


def call(arguments, options):
    return train(*arguments, **options)


def assert_equal(some, others):
    assert some.keys() == others.keys()
    assert all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize(("size", "backend"), BACKENDS)
def test_checkpoint_without_frozen_weights_resumes_bit_for_bit(size, backend):
    expected = trained(size, backend, "whole", checkpoint_frozen=True)
    ranks.run(size, call, (backend,), {"die_at": 4})
    saved = load_newest(RunDirectory("run"))[1]["model"][0]
    assert not any(".linear." in name for name in saved)
    assert {"0.up", "0.down", "3.running_mean"} <= saved.keys()
    assert_equal(trained(size, backend, resume=True), expected)
    export(RunDirectory("run"), RunDirectory("run").path / "adapter.safetensors")
    adapter = load_file("run/adapter.safetensors")
    assert not any(".linear." in name for name in adapter)
    assert torch.equal(adapter["2.up"], expected["2.up"])


@pytest.mark.parametrize(("size", "backend"), [(1, "auto"), (3, "fsdp")])
def test_resume_with_other_frozen_weights_is_refused(size, backend):
    ranks.run(size, call, (backend,), {"die_at": 4})
    with pytest.raises(UsageError, match="weight and 4 frozen parameters") as caught:
        trained(size, backend, resume=True, base=1)
    assert caught.value.code == "HT621"


def test_weights_that_were_trained_before_they_are_frozen_are_saved():
    expected = trained(3, "ddp", "whole", thaws=True, checkpoint_frozen=True)
    ranks.run(3, call, ("ddp",), {"die_at": 5, "thaws": True})
    assert "0.linear.weight" in load_newest(RunDirectory("run"))[1]["model"][0]
    assert_equal(trained(3, "ddp", thaws=True, resume=True), expected)


def test_frozen_weights_of_shards_are_those_of_one_process():
    ranks.run(3, call, ("fsdp",), {"die_at": 4, "norm": False})
    found = trained(1, "auto", resume=True, elastic=True, norm=False)
    expected = trained(1, "auto", "whole", norm=False)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
