"""The one command for all benchmarks, and what it reads of their records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """The benchmarks' own modules can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("measure", "verdicts"):
        sys.modules.pop(name, None)


def test_every_verdict_that_is_kept_has_its_target_and_figure(modules):
    from verdicts import verdicts

    rows = []
    for path in sorted((BENCHMARKS / "results").glob("*.json")):
        rows += [(path.stem, *row) for row in verdicts(json.loads(path.read_text()))]
    assert len(rows) >= 20
    assert all(all(row) for row in rows), [row for row in rows if not all(row)]
    assert ("hostlist", "first n[00000-09999]", "7.401 [7.327, 7.493]", "≤ 50 µs", "met") in rows


def test_all_of_them_are_in_the_table_and_in_the_readme():
    parts = {"__main__", "crowd", "loops", "measure", "verdicts"}
    files = {path.stem for path in BENCHMARKS.glob("*.py")} - parts
    helped = subprocess.run(
        [sys.executable, BENCHMARKS, "--help"], capture_output=True, text=True, check=True
    ).stdout
    readme = (BENCHMARKS / "README.md").read_text()
    for name in files:
        assert name in helped
        assert f"python benchmarks/{name}.py" in readme


def test_one_command_runs_them_and_says_what_came_out(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARKS, "--quick", "--only", "hostlist", "--save", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "hostlist.json").read_text())
    assert record["machine"]["cores"] > 0
    table = done.stdout.split("verdict\n")[-1]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["hostlist"] * 6
