"""`session.load_weights`: initial weights, from the files of several programs."""

import argparse
import fnmatch
import json
import logging
import pathlib
import sys

import numpy
import pytest
import torch
from checkpoints import save
from safetensors.torch import save_file
from torch import nn

from hpctrain.checkpoint import covering, export, fill_weights
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


def named(prefix, state):
    return {f"{prefix}{name}": value for name, value in state.items()}


ARGS = argparse.Namespace(lr=0.1, output=pathlib.PosixPath("out"), amp=True)
# Files of well-known training scripts, all of which are read without arguments.
FORMS = {
    "a state_dict()": lambda state: state,
    "compiled": lambda state: named("_orig_mod.", state),
    "DistributedDataParallel": lambda state: named("module.", state),
    "DistributedDataParallel, compiled": lambda state: named("module._orig_mod.", state),
    "nanoGPT": lambda state: {
        "model": named("_orig_mod.", state), "iter_num": 5, "config": {"a": 1}, "best": numpy.inf,
    },
    "torchvision": lambda state: {"model": state, "optimizer": {}, "epoch": 3, "args": ARGS},
    "torchvision, with averages": lambda state: {
        "model": state,
        "model_ema": {**named("module.", state), "n_averaged": torch.tensor(3)},
        "args": ARGS,
    },
    "timm": lambda state: {
        "epoch": 3, "arch": "x", "state_dict": state, "args": ARGS, "metric": numpy.float64(76.1),
    },
    "Lightning, self.model": lambda state: {
        "epoch": 1, "state_dict": named("model.", state), "pytorch-lightning_version": "2",
    },
    "Lightning, self.net": lambda state: {
        "state_dict": named("net.", state), "hyper_parameters": {"a": 1},
    },
    "torch's tutorial": lambda state: {"epoch": 1, "model_state_dict": state, "loss": 0.3},
    "DeepSpeed": lambda state: {"module": state},
    "Ignite": lambda state: {"model": state, "trainer": {"epoch": 1}},
    "with NumPy's random state": lambda state: {"model": state, "rng": numpy.random.get_state()},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_files_of_well_known_scripts_are_read(form, source, tmp_path):
    torch.save(FORMS[form](source.state_dict()), tmp_path / "weights.pt")
    model = Tied()
    fill_weights(model, tmp_path / "weights.pt")
    assert equal_state(model, source)
    assert model.second.weight is model.first.weight


# What the file has, and the arguments that the error suggests; each of them reads the weights.
CHOICES = {
    "another key": (lambda state: {"net": state, "epoch": 3}, ["key='net'"]),
    "two keys": (
        lambda state: {"model": state, "state_dict": state},
        ["key='model'", "key='state_dict'"],
    ),
    "other weights beside": (
        lambda state: {"state_dict": named("model.", state) | {"loss.weight": torch.ones(2)}},
        ["key='state_dict', prefix='model.'"],
    ),
    "student and teacher": (
        lambda state: named("student.", state) | named("teacher.", state),
        ["prefix='student.'", "prefix='teacher.'"],
    ),
}


@pytest.mark.parametrize("form", CHOICES)
def test_weights_in_an_unusual_place_are_refused_with_the_arguments_that_find_them(
    form, source, tmp_path
):
    build, choices = CHOICES[form]
    torch.save(build(source.state_dict()), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"but not first\.weight, first\.bias") as caught:
        fill_weights(Tied(), tmp_path / "weights.pt")
    assert caught.value.code == "HT714"
    *places, mapping = caught.value.fixes
    assert places == [f"session.load_weights(model, …, {choice})" for choice in choices]
    assert mapping.startswith("session.load_weights(model, {NAME: TENSOR, …})")
    for choice in choices:
        model = Tied()
        fill_weights(model, tmp_path / "weights.pt", **eval(f"dict({choice})"))
        assert equal_state(model, source)


def test_key_and_prefix_choose_the_averages(source, tmp_path):
    averages = named("module.", source.state_dict()) | {"n_averaged": torch.tensor(3)}
    torch.save({"model": Tied().state_dict(), "model_ema": averages}, tmp_path / "weights.pt")
    model = Tied()
    fill_weights(model, tmp_path / "weights.pt", key="model_ema", prefix="module.")
    assert equal_state(model, source)
    for wrong in ({"key": "ema"}, {"prefix": "net."}, {"key": "model", "prefix": "module."}):
        with pytest.raises(UsageError, match="has the keys model and model_ema, but not") as caught:
            fill_weights(Tied(), tmp_path / "weights.pt", **wrong)
        assert "session.load_weights(model, …, key='model')" in caught.value.fixes


def test_mapping_is_loaded_like_a_file(source):
    model = Tied()
    fill_weights(model, source.state_dict())
    assert equal_state(model, source)
    with pytest.raises(UsageError, match=r"the mapping has the keys a, but not first\.weight"):
        fill_weights(model, {"a": torch.ones(2)})


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_folder_of_hugging_face_is_read(name, source, tmp_path):
    state = {n: v.clone() for n, v in source.state_dict().items() if n != "second.weight"}
    if name.endswith(".json"):
        parts = {"a.safetensors": list(state)[:3], "b.safetensors": list(state)[3:]}
        files = {n: file for file, names in parts.items() for n in names}
        (tmp_path / name).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        parts = {name: list(state)}
    for file, names in parts.items():
        save_file({n: state[n] for n in names}, tmp_path / file, {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    model = Tied()
    fill_weights(model, tmp_path)
    assert equal_state(model, source)


@pytest.mark.parametrize("count", [1, 2])
def test_load_weights_takes_exported_weights(count, source, tmp_path):
    run = RunDirectory(tmp_path / "run")
    sources = [source, Tied()][:count]
    save(run, 1, {"model": [one.state_dict() for one in sources]}, {"metrics": {}})
    export(run, tmp_path / "out.safetensors")
    for number, one in enumerate(sources):
        model = Tied()
        fill_weights(
            model, tmp_path / "out.safetensors", prefix=f"model{number}." if count > 1 else ""
        )
        assert equal_state(model, one)


def test_file_of_several_models_needs_the_prefix_of_one(tmp_path):
    run = RunDirectory(tmp_path / "run")
    save(run, 1, {"model": [Tied().state_dict(), Tied().state_dict()]}, {"metrics": {}})
    export(run, tmp_path / "out.safetensors")
    with pytest.raises(UsageError, match=r"but not first\.weight") as caught:
        fill_weights(Tied(), tmp_path / "out.safetensors")
    assert [f"session.load_weights(model, …, prefix='model{n}.')" for n in (0, 1)] == [
        *caught.value.fixes[:2]
    ]


def test_load_weights_refuses_other_names_and_shapes(source, tmp_path):
    state = source.state_dict()
    del state["norm.weight"], state["norm.bias"]
    state |= {"head.weight": torch.ones(2), "first.bias": torch.ones(5)}
    torch.save(state, tmp_path / "other.pt")
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        fill_weights(model, tmp_path / "other.pt")
    found = caught.value.found
    expected = (
        "has no norm.weight; has no norm.bias; has head.weight, which the model does not have"
    )
    assert expected in found
    assert found.endswith("and 1 more")
    assert caught.value.fixes == (
        "use the weights of such a model",
        "skip=['first.bias', 'head.*', 'norm.bias', 'norm.weight'] (keeps the values that the "
        "script gave them)",
    )
    assert caught.value.code == "HT714"
    del state["head.weight"]
    state |= {name: torch.ones(3) for name in ("norm.weight", "norm.bias")}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"first.bias of shape \(5,\), the model's is \(3,\)"):
        fill_weights(model, tmp_path / "other.pt")
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
        fill_weights(model, tmp_path / "weights.pt")
    fix = caught.value.fixes[1]
    assert fix == "skip=['fc.*'] (keeps the values that the script gave them)"
    with caplog.at_level(logging.INFO, "hpctrain"):
        fill_weights(model, tmp_path / "weights.pt", skip=["fc.*"])
    assert torch.equal(model.conv.weight, source.conv.weight)
    assert equal_state(model.norm, source.norm)
    assert all(torch.equal(model.fc.state_dict()[name], new_head[name]) for name in new_head)
    assert "weights.pt, except fc.0.bias" in caplog.text


def test_pattern_that_matches_no_name_is_refused(source, tmp_path):
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"skip='fcc\.\*' matches no name") as caught:
        fill_weights(Tied(), tmp_path / "weights.pt", skip=["norm.*", "fcc.*"])
    assert caught.value.code == "HT714"
    model = Tied()
    fill_weights(model, tmp_path / "weights.pt", skip="norm.*")
    assert torch.equal(model.first.weight, source.first.weight)
    assert not torch.equal(model.norm.running_mean, source.norm.running_mean)


def test_no_patterns_are_suggested_for_the_weights_of_another_model(source, tmp_path):
    other = nn.ModuleDict(
        {"first": nn.Linear(3, 3), "other": nn.Sequential(*[nn.Linear(2, 2)] * 5)}
    )
    torch.save(other.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"has no second\.bias") as caught:
        fill_weights(Tied(), tmp_path / "weights.pt")
    assert not any("skip" in fix for fix in caught.value.fixes)


def test_load_weights_needs_a_shared_weight_only_once(source, tmp_path):
    state = source.state_dict()
    del state["second.weight"]  # as Hugging Face's libraries save it
    torch.save(state, tmp_path / "weights.pt")
    model = Tied()
    fill_weights(model, tmp_path / "weights.pt")
    assert equal_state(model, source)
    del state["first.weight"]
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"has no first\.weight; has no second\.weight\n"):
        fill_weights(model, tmp_path / "weights.pt")


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
def test_load_weights_refuses_other_files(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as weights") as caught:
        fill_weights(Tied(), tmp_path / name)
    assert caught.value.code == "HT713"


def test_load_weights_does_not_run_code(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"model": Hostile()}, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"objects of io\.open, and code in a file is never run"):
        fill_weights(Tied(), tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists()


def test_whole_model_is_refused_with_the_line_that_saves_its_weights(source, tmp_path):
    torch.save(nn.Sequential(source), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"it has objects of .*Sequential") as caught:
        fill_weights(Tied(), tmp_path / "weights.pt")
    assert caught.value.code == "HT713"
    assert caught.value.fixes[0].startswith("torch.save(model.state_dict(), FILE)")


@pytest.mark.parametrize(
    "content", [{}, {0: 1}, [], 3, "text", [3], {"model": 3}, {"first.weight": 3.0}]
)
def test_load_weights_refuses_a_file_without_a_model(content, tmp_path):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"(but not|has no) first\.weight") as caught:
        fill_weights(Tied(), tmp_path / "weights.pt")
    assert caught.value.code == "HT714"


def test_path_without_weights_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="No such file"):
        fill_weights(Tied(), tmp_path / "absent.pt")
    with pytest.raises(UsageError, match="File name too long"):
        fill_weights(Tied(), tmp_path / ("n" * 300))
    with pytest.raises(UsageError, match="is a folder without") as caught:
        fill_weights(Tied(), tmp_path)
    assert caught.value.fixes[-1].startswith(f"hpctrain export {tmp_path} FILE.safetensors")
    assert caught.value.code == "HT713"
    (tmp_path / "there.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UsageError, match="safetensors cannot be imported") as caught:
        fill_weights(Tied(), tmp_path / "there.safetensors")
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
def test_load_weights_keeps_names_that_the_model_has(kind, tmp_path):
    source, model = kind(), kind()
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    fill_weights(model, tmp_path / "weights.pt")
    assert equal_state(model, source)


def test_load_weights_fills_lazy_modules(tmp_path):
    source, model = nn.Linear(3, 2), nn.LazyLinear(2)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    fill_weights(model, tmp_path / "weights.pt")
    assert equal_state(model, source)


def test_part_of_a_checkpoint_names_the_command(tmp_path):
    run = RunDirectory(tmp_path / "run")
    save(run, 1, {"model": [nn.Linear(2, 2).state_dict()]}, {})
    with pytest.raises(UsageError, match="hpctrain export RUN_DIR FILE"):
        fill_weights(nn.Linear(2, 2), run.checkpoint(1) / "model.pt")
