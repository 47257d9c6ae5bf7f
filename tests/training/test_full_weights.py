"""All weights of a model for the script, over every backend: `state_dict` and `save_weights`."""

import pytest
import ranks
import torch
from battery import session
from safetensors.torch import load_model
from torch import nn

from hpctrain.errors import UsageError

WORLDS = pytest.mark.parametrize(
    ("backend", "size"), [("auto", 1), ("auto", 2), ("fsdp", 3), ("horovod", 2)]
)


class Tied(nn.Module):
    """A model with tied weights, of sizes that no number of ranks divides, and a buffer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.norm(self.words(x)))


def trained(opened):
    torch.manual_seed(3)
    model = Tied()
    model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with opened.run() as run:
        for _ in run.steps(2):
            opened.step(model(torch.arange(7)).pow(2).mean())
    return model


def states():
    with session(batch_size=7, run_dir="run") as opened:
        model = trained(opened)
        state = opened.state_dict(model)
        part = opened.state_dict(model.head)
        kinds = {type(value) for value in state.values()}
        parts = [opened.backend.whole(p.detach()) for p in model.state_dict().values()]
        assert all(map(torch.equal, state.values(), parts))
        return {name: value.tolist() for name, value in state.items()}, kinds, [*part]


@WORLDS
def test_state_dict_has_all_of_each_weight_on_every_rank(backend, size):
    found = ranks.values(ranks.run(size, states, env={"TEST_BACKEND": backend}))
    for state, kinds, part in found:
        assert list(state) == list(Tied().state_dict())
        assert kinds == {torch.Tensor}
        assert part == ["weight"]
        assert state == found[0][0]
        assert state["head.weight"] == state["words.weight"]


def save(path, reads):
    with session(batch_size=7, run_dir="run") as opened:
        model = trained(opened)
        state = opened.state_dict(model)
        opened.save_weights(path, model)
        opened.backend.barrier()
        read = reads(path)
        assert read.head.weight is read.words.weight
        assert all(map(torch.equal, read.state_dict().values(), state.values()))
        again = opened.prepare(Tied())
        opened.load_weights(again, path)
        loaded = opened.state_dict(again)
        return all(map(torch.equal, loaded.values(), state.values()))


def of_safetensors(path):
    model = Tied()
    load_model(model, path)
    return model


def of_torch(path):
    model = Tied()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


@WORLDS
@pytest.mark.parametrize(
    ("path", "reads"), [("model.safetensors", of_safetensors), ("model.pt", of_torch)]
)
def test_saved_weights_load_without_hpctrain_and_with_it(backend, size, path, reads, tmp_path):
    results = ranks.run(size, save, path, reads, env={"TEST_BACKEND": backend})
    assert ranks.values(results) == [True] * size
    assert sorted(one.name for one in tmp_path.glob(".*") if "model" in one.name) == []


def masters():
    with session(batch_size=7, precision="O2", loss_scale=128) as opened:
        model = trained(opened)
        state = opened.state_dict(model)
        (master,) = opened.precision.masters()[:1]
        assert model.words.weight.dtype == torch.float16
        return state["words.weight"].dtype, torch.equal(state["words.weight"], master)


def test_weights_in_half_precision_are_those_of_their_masters():
    assert ranks.values(ranks.run(2, masters)) == [(torch.float32, True)] * 2


def save_nowhere():
    with session(batch_size=7) as opened:
        opened.save_weights("absent/model.pt", opened.prepare(Tied()))


def test_file_that_cannot_be_written_is_an_error_on_all_ranks():
    for result in ranks.run(2, save_nowhere):
        assert isinstance(result, UsageError)
        assert "absent/model.pt" in str(result)


def save_parts():
    with session(batch_size=7, run_dir="run") as opened:
        model = trained(opened)
        with pytest.raises(
            UsageError, match=r"torch\.save of 4 tensors of which this rank has only"
        ):
            torch.save({"model": model.state_dict()}, "model.pt")
        torch.save(opened.state_dict(model), f"model-{opened.world.rank}.pt")
    return torch.save.__module__, getattr(torch.save, "__wrapped__", None)


def test_torch_save_of_parts_of_weights_is_refused():
    results = ranks.run(2, save_parts, env={"TEST_BACKEND": "fsdp"})
    assert ranks.values(results) == [("torch.serialization", None)] * 2
