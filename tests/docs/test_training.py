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

PAGE = (launches.TOP / "docs" / "training.md").read_text()
(LOOP,) = re.findall(r"^```python\n(# \w+\.py\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def train(*options):
    sys.argv = ["loop.py", "--run-dir", "run", *options]
    runpy.run_path("loop.py", run_name="__main__")


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
