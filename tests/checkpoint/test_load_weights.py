"""`--init-from FILE`: the first weights of a training."""

import argparse
import fnmatch
import logging
import shlex
import sys

import numpy
import pytest
import torch
from checkpoints import save
from torch import nn

import hpctrain
from hpctrain.checkpoint import check_weights, covering, export, fill_weights
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
    assert caught.value.fixes == (
        "the file of such a model",
        "--init-skip 'first.bias,head.*,norm.bias,norm.weight', to keep what the script made of "
        "them",
    )
    assert caught.value.code == "HT714"
    del state["head.weight"]
    state |= {name: torch.ones(3) for name in ("norm.weight", "norm.bias")}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"first.bias of shape \(5,\), the model's is \(3,\)"):
        fill_weights(tmp_path / "other.pt", model, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Classifier(nn.Module):
    """A backbone of two layers, and a head named `fc`."""

    def __init__(self, classes, depth=1):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(4, 4), nn.ReLU())]
        self.fc = nn.Sequential(*hidden, nn.Linear(4, classes))


@pytest.mark.parametrize(("classes", "depth"), [(7, 1), (7, 2)], ids=["shapes", "names"])
def test_error_of_another_head_has_the_line_that_skips_it(classes, depth, tmp_path, caplog):
    source, model = Classifier(5), Classifier(classes, depth)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    new_head = {name: value.clone() for name, value in model.fc.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        fill_weights(tmp_path / "weights.pt", model, 0)
    fix = caught.value.fixes[1]
    assert fix == "--init-skip 'fc.*', to keep what the script made of them"
    patterns = shlex.split(fix.removesuffix(", to keep what the script made of them"))[1].split(",")
    with caplog.at_level(logging.INFO, "hpctrain"):
        fill_weights(tmp_path / "weights.pt", model, 0, patterns)
    assert torch.equal(model.conv.weight, source.conv.weight)
    assert equal_state(model.norm, source.norm)
    assert all(torch.equal(model.fc.state_dict()[name], new_head[name]) for name in new_head)
    assert "but not fc.0.weight, fc.0.bias" in caplog.text


def test_init_skip_is_checked(source, tmp_path):
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"--init-skip 'fcc\.\*' fits no name") as caught:
        fill_weights(tmp_path / "weights.pt", Tied(), 0, ["norm.*", "fcc.*"])
    assert caught.value.code == "HT714"
    # A pattern may be for one of several models.
    torch.save([source.state_dict(), Classifier(3).state_dict()], tmp_path / "weights.pt")
    for number, model in enumerate([Tied(), Classifier(4)]):
        fill_weights(tmp_path / "weights.pt", model, number, ["fc.*"])
    with pytest.raises(UsageError, match=r"--init-skip 'fc\.\*' without --init-from") as caught:
        hpctrain.Session(init_skip="fc.*")
    assert caught.value.fixes == ("--init-from FILE",)


def test_no_line_for_the_weights_of_another_model(source, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"has no first\.weight") as caught:
        fill_weights(tmp_path / "weights.pt", Tied(), 0)
    assert not any("--init-skip" in fix for fix in caught.value.fixes)


def test_init_from_needs_a_shared_weight_only_once(source, tmp_path):
    state = source.state_dict()
    del state["second.weight"]  # as Hugging Face's libraries save it
    torch.save(state, tmp_path / "weights.pt")
    model = Tied()
    fill_weights(tmp_path / "weights.pt", model, 0)
    assert equal_state(model, source)
    del state["first.weight"]
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"has no first\.weight; has no second\.weight\n"):
        fill_weights(tmp_path / "weights.pt", model, 0)


def test_patterns_cover_the_chosen_names_alone():
    names = ["a.b.w", "a.b.v", "a.c.w", "fc.w", "fc.v", "t", "ab.w", "l[0].w", "l[0].v"]
    assert covering(["a.b.w", "a.b.v"], names) == ["a.b.*"]
    assert covering(["a.b.w", "a.b.v", "a.c.w", "t"], names) == ["a.*", "t"]
    assert covering(["fc.w", "ab.w"], names) == ["ab.*", "fc.w"]
    (pattern,) = covering(["l[0].w", "l[0].v"], names)
    assert fnmatch.filter(names, pattern) == ["l[0].w", "l[0].v"]
    assert covering([], names) == []


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
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
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


def test_part_of_a_checkpoint_names_the_command(tmp_path):
    run = RunDirectory(tmp_path / "run")
    save(run, 1, {"model": [nn.Linear(2, 2).state_dict()]}, {})
    with pytest.raises(UsageError, match="hpctrain export RUN_DIR FILE"):
        fill_weights(run.checkpoint(1) / "model.pt", nn.Linear(2, 2), 0)
