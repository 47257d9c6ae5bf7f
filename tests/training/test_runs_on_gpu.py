"""Runs on GPUs: dataparallel in one process, and the example."""

import json

import launches
import pytest
import ranks
import torch
from battery import session, train
from on_gpu import visible
from torch import nn


def train_without_batch_norm(precision):
    """Train without batch norm, whose statistics would be those of each GPU; return losses."""
    with session(
        batch_size=24, max_steps=10, precision=precision, log_every=1, run_dir="run"
    ) as opened:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        names = list(model.state_dict())
        losses, model = train(opened, 10, model)
        assert list(model.state_dict()) == names
        return losses, opened.backend.name, isinstance(model, nn.DataParallel)


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ("fp64", 1e-9),
        ("fp32", 1e-4),
        ("tf32", 1e-2),
        *((name, 0.05) for name in ("bf16", "fp16", "O1", "O2", "O3")),
    ],
)
def test_dataparallel_equals_one_gpu(gpu, lacking, tmp_path, monkeypatch, precision, tolerance):
    if len(visible()) < 2:
        lacking("two-gpus", "one GPU would be compared with itself")
    found = {}
    cases = {"dataparallel": visible(), "single": visible()[:1]}
    for backend, gpus in cases.items():
        (tmp_path / backend).mkdir()
        monkeypatch.chdir(tmp_path / backend)
        env = {"TEST_BACKEND": backend, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        ((found[backend], name, wrapped),) = ranks.values(
            gpu(1, train_without_batch_norm, precision, env=env)
        )
        assert (name, wrapped) == (backend, backend == "dataparallel")
    assert len(found["single"]) == 10
    assert found["dataparallel"] == pytest.approx(found["single"], rel=tolerance)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [[], ["--precision", "fp16"]])
def test_example_trains_the_digits_on_gpu(tmp_path, options):
    command = [launches.PYTHON, str(launches.EXAMPLE), "--run-dir", "run", *options]
    done = launches.start(command, tmp_path, CUDA_VISIBLE_DEVICES=visible()[0])
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["metrics"]["top1"] > 0.95
    assert summary["precision"] in (options or ["bf16", "fp16"])
    assert "single over cuda:0" in done.stderr
