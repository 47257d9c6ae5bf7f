"""`--init-from FILE`: the first weights of a training."""

import argparse
import logging
import sys

import numpy
import pytest
import torch
from torch import nn

from hpctrain.checkpoint import check_weights, export, fill_weights, save
from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory


class Tied(nn.Module):
    """Two layers that share their weight, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def source():
    torch.manual_seed(1)
    model = Tied()
    model.norm.running_mean.fill_(7.0)
    return model


def equal_state(model, other):
    other_state = other.state_dict()
    return all(torch.equal(value, other_state[name]) for name, value in model.state_dict().items())


FORMS = {
    "a state_dict()": lambda state: state,
    "torchvision's scripts": lambda state: {
        "model": state,
        "optimizer": {},
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, amp=True),
    },
    "timm's scripts": lambda state: {
        "epoch": 3,
        "arch": "x",
        "state_dict": state,
        "args": argparse.Namespace(lr=0.1),
        "metric": numpy.float64(76.1),
    },
    "of a DistributedDataParallel": lambda state: {f"module.{n}": v for n, v in state.items()},
    "a part of a checkpoint": lambda state: [state],
}


@pytest.mark.parametrize("form", FORMS)
def test_init_from_takes_common_formats(form, source, tmp_path):
    torch.save(FORMS[form](source.state_dict()), tmp_path / "weights.pt")
    model = Tied()
    fill_weights(tmp_path / "weights.pt", model, 0)
    assert equal_state(model, source)
    assert model.second.weight is model.first.weight


@pytest.mark.parametrize("count", [1, 2])
def test_init_from_takes_exported_weights(count, source, tmp_path):
    run = RunDirectory(tmp_path / "run")
    sources = [source, Tied()][:count]
    save(run, 1, {"model": [one.state_dict() for one in sources]}, {"metrics": {}})
    export(run, tmp_path / "out.safetensors")
    for number, one in enumerate(sources):
        model = Tied()
        fill_weights(tmp_path / "out.safetensors", model, number)
        assert equal_state(model, one)


def test_init_from_leaves_other_models_alone(source, tmp_path, caplog):
    torch.save(source.state_dict(), tmp_path / "one.pt")
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "hpctrain"):
        fill_weights(tmp_path / "one.pt", model, 1)
    assert "one.pt has no model 1" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_init_from_refuses_other_names_and_shapes(source, tmp_path):
    state = source.state_dict()
    del state["norm.weight"], state["norm.bias"]
    state |= {"head.weight": torch.ones(2), "first.bias": torch.ones(5)}
    torch.save(state, tmp_path / "other.pt")
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        fill_weights(tmp_path / "other.pt", model, 0)
    found = caught.value.found
    expected = (
        "has no norm.weight; has no norm.bias; has head.weight, which the model does not have"
    )
    assert expected in found
    assert found.endswith("and 1 more")
    assert "strict=False" in caught.value.fixes[1]
    assert caught.value.code == "HT714"
    del state["head.weight"]
    state |= {name: torch.ones(3) for name in ("norm.weight", "norm.bias")}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"first.bias of shape \(5,\), the model's is \(3,\)"):
        fill_weights(tmp_path / "other.pt", model, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x80\x04", b"\xff" * 64])
def test_init_from_refuses_other_files(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as weights") as caught:
        fill_weights(tmp_path / name, Tied(), 0)
    assert caught.value.code == "HT713"


def test_init_from_does_not_run_code(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"model": Hostile()}, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"it needs io\.open, and may run its own code"):
        fill_weights(tmp_path / "weights.pt", Tied(), 0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [{}, {0: 1}, [], 3, "text", [3], {"model": 3}, {"first.weight": 3.0}]
)
def test_init_from_refuses_a_file_without_a_model(content, tmp_path):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"has no first\.weight"):
        fill_weights(tmp_path / "weights.pt", Tied(), 0)


def test_init_from_is_checked_before_the_rendezvous(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="No such file"):
        check_weights(tmp_path / "absent.pt")
    with pytest.raises(UsageError, match="File name too long"):
        check_weights(tmp_path / ("n" * 300))
    with pytest.raises(UsageError, match="is a folder") as caught:
        check_weights(tmp_path)
    assert caught.value.fixes == (f"hpctrain export {tmp_path} FILE.safetensors",)
    assert caught.value.code == "HT713"
    (tmp_path / "there.safetensors").touch()
    check_weights(tmp_path / "there.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match="safetensors cannot be imported") as caught:
        check_weights(tmp_path / "there.safetensors")
    assert caught.value.code == "HT711"


class Ensemble(nn.Module):
    """A model whose names begin as in a file of several models."""

    def __init__(self):
        super().__init__()
        self.model0, self.model1, self.module = (nn.Linear(2, 2) for _ in range(3))


class OnlyChild(nn.Module):
    """A model whose names begin as those of DistributedDataParallel."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.mark.parametrize("kind", [Ensemble, OnlyChild])
def test_init_from_keeps_names_that_the_model_has(kind, tmp_path):
    source, model = kind(), kind()
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    fill_weights(tmp_path / "weights.pt", model, 0)
    assert equal_state(model, source)


def test_init_from_fills_lazy_modules(tmp_path):
    source, model = nn.Linear(3, 2), nn.LazyLinear(2)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    fill_weights(tmp_path / "weights.pt", model, 0)
    assert equal_state(model, source)
