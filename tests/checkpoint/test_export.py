"""`hpctrain export`: the weights of a checkpoint for other programs."""

import json
import os
import subprocess
import sys

import pytest
import torch
from checkpoints import save
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import hpctrain
from hpctrain.checkpoint import export, fill_weights
from hpctrain.cli import main
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.rundir import RunDirectory


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("nothing", torch.empty(0))


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    torch.manual_seed(0)
    for step, top1 in ((1, 0.2), (2, 0.9), (3, 0.4)):
        model = Tied()
        save(
            run,
            step,
            {"model": [model.state_dict()]},
            {"metrics": {"top1": top1, "eval_loss": 1 - top1}},
        )
        run.models = [*getattr(run, "models", []), model]
    run.identity.write_text(json.dumps({"name": "digits"}))
    return run


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_exported_weights_load_into_a_model(run, tmp_path):
    target = tmp_path / "out.safetensors"
    assert export(run, target) == 3
    model = Tied()
    load_model(model, str(target))
    for name, value in run.models[2].state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    fields = metadata(target)
    assert fields["step"] == "3"
    assert fields["run"] == "digits"
    assert fields["format"] == "pt"
    assert fields["second.weight"] == "first.weight"


def test_export_of_views(tmp_path):
    run = RunDirectory(tmp_path / "run")
    matrix = torch.arange(12.0).reshape(3, 4)
    views = {"whole": matrix, "corner": matrix[:2, :2], "turned": matrix.t(), "again": matrix}
    views |= {"wide": torch.ones(2, 1).expand(2, 9), "none": torch.empty(0), "non": torch.empty(0)}
    save(run, 1, {"model": [views]}, {})
    target = tmp_path / "out.safetensors"
    export(run, target)
    loaded = load_file(target)
    assert metadata(target)["again"] == "whole"
    del views["again"]
    assert loaded.keys() == views.keys()
    assert all(torch.equal(loaded[name], value) for name, value in views.items())


@pytest.mark.parametrize(
    ("options", "step"),
    [([], 3), (["--step", "1"], 1), (["--best", "top1"], 2), (["--best", "eval_loss"], 2)],
)
def test_export_command(run, tmp_path, capsys, options, step):
    target = tmp_path / "out.safetensors"
    target.write_text("an old one")
    assert main(["export", str(run.path), str(target), *options]) == 0
    assert capsys.readouterr().out == f"{target}: the weights of step {step}\n"
    weight = run.models[step - 1].first.weight
    assert torch.equal(load_file(target)["first.weight"], weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "run"]


def test_export_of_several_models(tmp_path):
    run = RunDirectory(tmp_path / "run")
    models = [nn.Linear(2, 2).state_dict(), {**nn.Linear(2, 2).state_dict(), "count": 3}]
    save(run, 1, {"model": models}, {})
    target = tmp_path / "out.safetensors"
    export(run, target)
    loaded = load_file(target)
    assert sorted(loaded) == ["model0.bias", "model0.weight", "model1.bias", "model1.weight"]
    assert torch.equal(loaded["model1.bias"], models[1]["bias"])
    assert metadata(target)["run"] == "run"


class Backbone(nn.Module):
    """Seven blocks, and a head."""

    def __init__(self):
        super().__init__()
        for number in range(7):
            self.add_module(f"block{number}", nn.Linear(2, 2))
        self.token = nn.Parameter(torch.zeros(2))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.block0(x + self.token))


def test_checkpoint_and_export_name_what_was_frozen(tmp_path, capsys):
    target, run = tmp_path / "out.safetensors", RunDirectory(tmp_path / "run")
    with hpctrain.Session(batch_size=2, run_dir=str(run.path)) as session:
        model = Backbone().requires_grad_(False)
        model.head.requires_grad_(True)
        model = session.prepare(model)
        with session.run() as training:
            training.save()
            for _ in training.steps(1):
                model.requires_grad_(True)
    parameters = [*(f"block{number}.*" for number in range(7)), "token"]
    manifest = json.loads((run.checkpoint(0) / "manifest.json").read_text())
    assert manifest["frozen"] == {"count": 15, "of": 17, "parameters": parameters}
    capsys.readouterr()
    assert main(["export", str(run.path), str(target), "--step", "0"]) == 0
    named = "block0.*, block1.*, block2.*, block3.*, block4.*, and 3 more"
    assert capsys.readouterr().out.splitlines()[1:] == [f"frozen: 15 of 17 parameters: {named}"]
    assert metadata(target)["frozen"] == f"15 of 17 parameters: {', '.join(parameters)}"
    fill_weights(Backbone(), target)  # which reads other names of weights in the metadata
    assert main(["export", str(run.path), str(target), "--step", "1"]) == 0
    assert "frozen" not in capsys.readouterr().out
    assert "frozen" not in metadata(target)


def test_export_to_several_files(run, tmp_path, capsys):
    """The files have Hugging Face's index, and begin a training."""
    target = tmp_path / "out"
    target.mkdir()
    assert main(["export", str(run.path), str(target), "--file-gb", "4e-8"]) == 0
    index = json.loads((target / "model.safetensors.index.json").read_text())
    expected = {n: v for n, v in run.models[2].state_dict().items() if n != "second.weight"}
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    assert set(index["weight_map"].values()) == {
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    }
    for name, value in expected.items():
        assert torch.equal(load_file(target / index["weight_map"][name])[name], value)
    for source in (target, target / "model.safetensors.index.json"):
        model = Tied()
        fill_weights(model, source)
        for name, value in run.models[2].state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    assert main(["export", str(run.path), str(target)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_export_holds_one_file_in_memory(run, tmp_path, monkeypatch):
    """Each file is read from the checkpoint when it is written."""
    held = []
    monkeypatch.setattr("safetensors.torch.save_file", lambda weights, *_: held.append(weights))
    monkeypatch.setattr("os.fsync", lambda _: None)
    export(run, tmp_path / "out", file_bytes=1)
    assert [len(weights) for weights in held] == [1, 1, 1, 1]


def test_export_refuses_a_damaged_checkpoint(run, tmp_path):
    target = tmp_path / "out.safetensors"
    path = run.checkpoint(3) / "model.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="has changed since it was written") as caught:
        export(run, target, step=3)
    assert caught.value.code == "HT707"
    assert not target.exists()
    assert export(run, target) == 2


def test_export_of_a_missing_checkpoint(run, tmp_path, capsys):
    target = str(tmp_path / "out.safetensors")
    assert main(["export", str(run.path), target, "--step", "7"]) == 1
    assert "a step that has a checkpoint: 1, 2, 3" in capsys.readouterr().err
    assert main(["export", str(run.path), target, "--best", "top5"]) == 1
    error = capsys.readouterr().err
    assert "  or:       run with --keep-best NAME\n  more:     hpctrain explain HT709\n" in error
    assert main(["export", str(tmp_path / "none"), target]) == 1
    assert "no checkpoint in" in capsys.readouterr().err
    assert main(["export", str(run.path), str(tmp_path / "none" / "out")]) == 2
    assert "could not be written" in capsys.readouterr().err


def test_export_is_atomic(run, tmp_path, monkeypatch):
    target = tmp_path / "out.safetensors"
    target.write_text("before")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("broken")))
    with pytest.raises(UsageError, match="broken") as caught:
        export(run, target)
    assert caught.value.code == "HT712"
    assert target.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "run"]


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_export_mode_follows_the_umask(run, tmp_path, mask):
    before = os.umask(mask)
    try:
        export(run, tmp_path / "out.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "out.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


def test_export_without_safetensors(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UsageError, match="safetensors cannot be imported") as caught:
        export(run, tmp_path / "out.safetensors")
    assert "pip install" in caught.value.fixes[0]
    assert caught.value.code == "HT711"


def test_export_help_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from hpctrain.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "export", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "RUN OUT" in done.stdout
