"""Models called by `torch.func`: with other weights, and inside of transforms."""

import json
import os

import pytest
import ranks
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import hpctrain
from hpctrain.errors import UsageError

STEPS = 4


def inner_loop(model, x):
    """MAML: the loss after one step of gradient descent on the first half of each task."""

    def loss(parameters, points):
        return (functional_call(model, parameters, (points,)) - points.sum(1)).pow(2).mean()

    def adapted(task):
        parameters = dict(model.named_parameters())
        slopes = grad(loss)(parameters, task[:2])
        parameters = {n: p - 0.1 * slopes[n] for n, p in parameters.items()}
        return loss(parameters, task[2:])

    return vmap(adapted)(x).mean()


def doubled(model, x):
    """The loss of weights that are twice those of the model."""
    weights = {name: 2 * one for name, one in model.named_parameters()}
    return functional_call(model, weights, (x,)).pow(2).mean()


class Inside(nn.Module):
    """A module whose forward method calls another one with other weights."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return inner_loop(self.model, x)


def train(how, backend, resume=False, die_at=None):
    options = {"fsdp": "blocks=Inside"} if backend == "fsdp" and how == "inside" else {}
    with hpctrain.Session(
        precision="fp64", global_batch=6, max_steps=STEPS, deterministic=True, run_dir="run",
        checkpoint_every=1, resume=resume, backend=backend, **options,
    ) as session:  # fmt: skip
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
        model = nn.Sequential(model.double(), nn.Flatten(0))
        model = Inside(model) if how == "inside" else model
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        samples = torch.randn(24, 4, 3, generator=torch.Generator().manual_seed(1)).double()
        losses = {"inner loop": inner_loop, "inside": lambda model, x: model(x)}
        with session.run() as run:
            for _ in run.epochs():
                for x in run.batches(session.loader(samples)):
                    batch = x.flatten(0, 1) if how in ("doubled", "evaluated") else x
                    if how == "evaluated":
                        session.step(model(batch).pow(2).mean())
                        zeros = {n: 0 * p for n, p in model.named_parameters()}
                        assert functional_call(model, zeros, (batch,)).abs().max() == 0
                    else:
                        session.step(losses.get(how, doubled)(model, batch))
                    if run.step == die_at:
                        os._exit(9)
        return {name: one.tolist() for name, one in session.state_dict(model).items()}


def norm(weights):
    return torch.tensor([x for one in weights.values() for x in torch.tensor(one).flatten()])


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["inner loop", "doubled", "inside", "evaluated"])
def test_functional_calls_train_as_in_one_process(tmp_path, monkeypatch, how, backend):
    (alone,) = ranks.values(ranks.run(1, train, how, "auto"))
    (tmp_path / "three").mkdir()
    monkeypatch.chdir(tmp_path / "three")
    for weights in ranks.values(ranks.run(3, train, how, backend)):
        torch.testing.assert_close(norm(weights), norm(alone), rtol=1e-12, atol=1e-12)


def test_inner_loop_resumes_bit_for_bit_after_a_kill(tmp_path, monkeypatch):
    expected = ranks.values(ranks.run(3, train, "inner loop", "ddp"))
    (tmp_path / "killed").mkdir()
    monkeypatch.chdir(tmp_path / "killed")
    ranks.run(3, train, "inner loop", "ddp", False, 3)
    assert json.dumps(ranks.values(ranks.run(3, train, "inner loop", "ddp", True))) == json.dumps(
        expected
    )


@pytest.mark.parametrize("how", ["inner loop", "doubled", "evaluated"])
def test_fsdp_refuses_other_weights(how):
    results = ranks.run(2, train, how, "fsdp")
    assert all(isinstance(result, Exception) for result in results)
    errors = [one for one in results if isinstance(one, UsageError)]
    assert errors, results
    assert all(one.code == "HT319" for one in errors)
    assert "under --backend fsdp" in errors[0].found


def test_module_with_a_functional_call_inside_trains_over_fsdp(tmp_path, monkeypatch):
    (alone,) = ranks.values(ranks.run(1, train, "inside", "auto"))
    (tmp_path / "three").mkdir()
    monkeypatch.chdir(tmp_path / "three")
    for weights in ranks.values(ranks.run(3, train, "inside", "fsdp")):
        torch.testing.assert_close(norm(weights), norm(alone), rtol=1e-12, atol=1e-12)
