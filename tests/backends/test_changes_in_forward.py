"""Models whose forward pass changes parameters in place, as MoCo does for its key encoder."""

import pytest
import ranks
import torch
from torch import nn

import hpctrain
from hpctrain.backends.ddp import rehearsal
from hpctrain.errors import UsageError

STEPS = 5


class Counter(nn.Module):
    """A linear layer that counts its calls in a frozen parameter and in a buffer."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(1))
        self.how = how

    def forward(self, x):
        with torch.no_grad():
            self.buffer += 1
            if self.how == "in place":
                self.frozen += 1
            elif self.how == "of data":
                self.frozen.data.add_(1)
            else:
                self.frozen.data = self.frozen.data + 1
        return self.layer(x)


def count(how, backend, most_bytes=None):
    """Train five steps; return what the model has counted."""
    if most_bytes is not None:
        rehearsal._MAX_BYTES = most_bytes
    with hpctrain.Session(backend=backend, deterministic=True, run_dir="run") as session:
        model = Counter(how)
        model, _ = session.prepare(model, torch.optim.SGD(model.layer.parameters(), 0.1))
        with session.run() as run:
            for _ in run.steps(STEPS):
                session.step(model(torch.ones(2, 4)).pow(2).mean())
        weights = session.state_dict(model)
        return weights["frozen"].tolist(), weights["buffer"].item()


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["in place", "of data", "replaced"])
def test_parameters_change_once_for_each_step(how, backend):
    for found in ranks.values(ranks.run(3, count, how, backend)):
        assert found == ([STEPS] * 3, STEPS)


def test_parameters_of_a_large_model_that_would_change_twice_are_refused():
    for result in ranks.run(2, count, "in place", "ddp", 8):
        assert isinstance(result, UsageError), result
        assert "forward pass of a model changes its parameters" in result.found


@pytest.mark.parametrize("how", ["in place", "of data", "replaced"])
def test_fsdp_refuses_a_change_that_it_would_lose(how):
    errors = [one for one in ranks.run(3, count, how, "fsdp") if isinstance(one, UsageError)]
    assert errors
    assert all("changes frozen in place" in error.found for error in errors)


def embed(backend):
    with hpctrain.Session(backend=backend) as session:
        session.prepare(nn.Sequential(nn.Embedding(5, 2, sparse=True)))


def test_fsdp_refuses_sparse_embeddings():
    with pytest.raises(UsageError, match="--backend fsdp, but 0 has sparse gradients"):
        ranks.values(ranks.run(2, embed, "fsdp"))
