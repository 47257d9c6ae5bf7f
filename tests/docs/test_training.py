"""The script of docs/training.md, run as it is printed there."""

import json
import re
import runpy
import sys
from pathlib import Path

import launches
import pytest
import ranks
import torch
from checkpoints import load_newest

from hpctrain.rundir import RunDirectory

PAGE = (launches.TOP / "docs" / "training.md").read_text()
LOOP, RATES = re.findall(r"^```python\n(# \w+\.py\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def train(*options, script="loop.py"):
    sys.argv = [script, "--run-dir", "run", *options]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize(("size", "call"), [(1, "step(loss, optimizer)"), (2, "step(loss)")])
def test_loop_of_the_page_trains(size, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"| `session.{call}` |" in PAGE
    Path("loop.py").write_text(LOOP.replace("session.step(loss)", f"session.{call}"))
    ranks.values(ranks.run(size, train, "--epochs", "1"))
    summary = json.loads(Path("run/summary.json").read_text())
    steps = 23  # 1,437 digits, 64 in a step, the last one smaller
    assert (summary["status"], summary["step"], summary["epoch"]) == ("done", steps, 1)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "top1" in row] == [20]
    assert torch.load("run/model.pt").keys() == {"1.weight", "1.bias"}


def test_loop_of_the_page_has_every_call_of_its_table():
    section = PAGE.partition("## Batches")[0]
    shown = re.findall(r"^\| `(?:session|run|parser)\.([\w.]+)", section, re.MULTILINE)
    assert len(shown) >= 6
    for name in shown:
        assert f".{name}" in LOOP


def train_with_rates(text, directory, *options):
    Path("rates.py").write_text(text)
    train("--run-dir", directory, *options, script="rates.py")


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_rates_and_average_of_the_page_step_once_for_each_step_and_resume(
    backend, tmp_path, monkeypatch
):
    """Compare one process with ranks that accumulate and are interrupted inside an epoch."""
    monkeypatch.chdir(tmp_path)
    exact = ("--precision", "fp64", "--global-batch", "24", "--log-every", "1")
    ranks.values(ranks.run(1, train_with_rates, RATES, "one", *exact))
    split = (*exact, "--backend", backend, "--batch-size", "4", "--epochs", "3")
    ranks.values(ranks.run(3, train_with_rates, RATES, "many", *split, "--max-steps", "7"))
    ranks.values(ranks.run(3, train_with_rates, RATES, "many", *split, "--resume"))
    rates, averages = {}, {}
    for directory in ("one", "many"):
        lines = Path(directory, "metrics.jsonl").read_text().splitlines()
        rates[directory] = [json.loads(line)["lr"] for line in lines]
        step, state = load_newest(RunDirectory(directory))
        averages[directory] = state["model"][1]
        assert step == averages[directory]["n_averaged"] == 30
    assert rates["many"] == pytest.approx(rates["one"], rel=1e-12)
    peak = 0.1 * 24 / 256
    warmup = [part * peak for part in (0.325, 0.55, 0.775, 1)]
    assert rates["one"][:4] == pytest.approx(warmup)  # a row has the rate of the next step
    assert rates["one"][-1] < 0.01 * peak
    torch.testing.assert_close(averages["many"], averages["one"], rtol=1e-9, atol=1e-9)
