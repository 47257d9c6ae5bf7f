"""The programs in benchmarks/: imports without the compared packages, and the form of records."""

import datetime
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Modules of the extra `benchmark`, for comparison.
PEERS = ("accelerate", "ignite", "lightning_fabric", "timm")
FIGURE = re.compile(r"-?[\d.]+ \[-?[\d.]+, -?[\d.]+\]")


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """Return the names of all modules of benchmarks/, which the test can import."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch's compiler sets it
    names = {path.stem for path in BENCHMARKS.glob("*.py")} - {"__main__"}
    before = dict(sys.modules)
    for name in names & before.keys():  # an example of the same name, which another test has loaded
        del sys.modules[name]
    yield sorted(names)
    sys.modules.update({name: before[name] for name in names & before.keys()})
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "") or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]


def test_every_benchmark_imports_without_its_peers(modules, monkeypatch):
    for peer in PEERS:
        monkeypatch.setitem(sys.modules, peer, None)
    for name in modules:
        assert Path(importlib.import_module(name).__file__).parent == BENCHMARKS


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda p: p.stem
)
def test_benchmark_record_has_its_origin_and_outcomes_with_figure_and_target(modules, path):
    from measure import outcomes

    record = json.loads(path.read_text())
    assert datetime.datetime.fromisoformat(record["date"]).tzinfo is not None
    assert re.match(r"[0-9a-f]{12}", record["commit"])
    assert re.match(r"python \S+\.py", record["command"])
    assert record["machine"]["cores"] > 0
    assert record["versions"]["python"]
    for what, figure, target, outcome in outcomes(record):
        assert what
        assert FIGURE.fullmatch(figure), what
        assert target.startswith(("≤ ", "≥ ")), what
        assert outcome.partition(",")[0] in ("met", "missed"), what


def test_some_benchmark_records_have_outcomes(modules):
    from measure import outcomes

    results = (json.loads(path.read_text()) for path in (BENCHMARKS / "results").glob("*.json"))
    assert sum(len(list(outcomes(record))) for record in results) >= 10


def test_every_benchmark_is_in_the_command_and_in_the_readme(modules):
    table = importlib.import_module("suite").BENCHMARKS
    guard = 'if __name__ == "__main__":'
    programs = {name for name in modules if guard in (BENCHMARKS / f"{name}.py").read_text()}
    assert set(table) == programs
    readme = (BENCHMARKS / "README.md").read_text()
    assert [name for name in programs if f"python benchmarks/{name}.py" not in readme] == []


def test_targets_are_judged_on_both_sides_and_by_their_interval(modules):
    from harness import compare

    rounds = {"base": [{"ms": 10.0}] * 9, "arm": [{"ms": 9.0}, *[{"ms": 11.0}] * 8]}
    limits = {"ratio": "≤ 1.02", "more_ms": "≥ 1"}
    arm = compare(rounds, "base", ("ratio", "more_ms"), {"arm": limits})["arm"]
    assert (arm["ratio"]["median"], arm["more_ms"]["median"]) == (1.1, 1.0)
    assert arm["targets"] == {
        "ratio": {"limit": "≤ 1.02", "outcome": "missed"},
        "more_ms": {"limit": "≥ 1", "outcome": "met"},
    }
    noisy = {"base": [{"ms": 10.0}] * 3, "arm": [{"ms": ms} for ms in (9.0, 10.0, 11.0)]}
    arm = compare(noisy, "base", targets={"arm": {"ratio": "≤ 1.02"}})["arm"]
    assert arm["targets"]["ratio"]["outcome"] == "met, within the noise"


@pytest.mark.parametrize(
    ("limit", "now", "change"),
    [
        ("≤ 1.02", (1.10, 1.05, 1.15), "worse"),
        ("≤ 1.02", (1.02, 0.99, 1.05), "as before"),
        ("≤ 1.02", (0.90, 0.80, 0.95), "better"),
        ("≥ 0.99", (0.90, 0.80, 0.95), "worse"),
        ("≥ 0.99", (1.10, 1.05, 1.15), "better"),
    ],
)
def test_check_tells_what_got_worse_by_more_than_its_noise(modules, limit, now, change):
    from measure import changes

    def record(median, low, high, cores=2):
        figure = {"median": median, "low": low, "high": high, "count": 9}
        arm = {"ratio": figure, "targets": {"ratio": {"limit": limit, "outcome": "met"}}}
        machine = {"cpu": "AMD EPYC", "cores": cores}
        return {"benchmark": "step", "machine": machine, "results": {"hpctrain": arm}}

    kept = record(1.0, 0.98, 1.02)
    ((subject, before, after, word),) = changes(kept, record(*now))
    assert (subject, word) == ("hpctrain, ratio", change)
    assert (before[:5], after[:5]) == ("1.000", f"{now[0]:.3f}")
    ((_, _, _, other),) = changes(kept, record(*now, cores=64))
    assert other == "kept on another machine: AMD EPYC"


@pytest.mark.e2e
def test_benchmarks_command_runs_one_and_prints_its_outcomes(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARKS, "--quick", "--only", "hostlist", "--save", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "hostlist.json").read_text())
    assert record["machine"]["cores"] > 0
    table = done.stdout.split("outcome\n")[-1]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["hostlist"] * 3
    # Not the results in benchmarks/, which are from another machine.
    command = [sys.executable, BENCHMARKS, "--only", "hostlist", "--check", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:1] for line in done.stdout.splitlines()[-3:]] == [["hostlist"]] * 3
    assert "change" in done.stdout
    assert "another machine" not in done.stdout
