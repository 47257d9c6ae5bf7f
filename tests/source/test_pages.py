"""The tables of pages, made from result files, and the rules for these files."""

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
RECORDS = sorted((TOP / "benchmarks" / "results").glob("*.json"))
# Older records may come from a tree with uncommitted changes; the page marks them.
CLEAN_SINCE = "2026-11-22T20:00"
# Measured figures: an interval, a small difference, a time or size, a date.
FIGURE = re.compile(
    r"\[-?[\d.,]+, -?[\d.,]+\]|\d\.\de-\d|\d ?(?:ms|µs|[kMG]B)\b|\d\.\d+ (?:s|times|×)|20\d\d-\d\d"
)


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a module of benchmarks/ or tests/ for one test."""
    for folder in ("tests", "benchmarks", "benchmarks/pages"):
        monkeypatch.syspath_prepend(str(TOP / folder))
    before = set(sys.modules)
    yield importlib.import_module
    for name in ("blocks", "charts", "tables", "suite", "measure", "results"):
        if name not in before:
            sys.modules.pop(name, None)


def copy_of(folder, *names):
    """Copy files and folders of the repository; return the folder of the copy."""
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (TOP / name).is_dir():
            shutil.copytree(
                TOP / name, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
            )
        else:
            shutil.copy(TOP / name, target)
    return folder


def run(folder, *command):
    """Run a Python program of a folder, with this repository's package."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={"PYTHONPATH": str(TOP), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def git(folder, *words):
    identity = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_pages_equal_their_result_files(load):
    blocks = load("blocks")
    differing = [str(path.relative_to(TOP)) for path in blocks.differing(TOP)]
    assert not differing, f"{differing} differ from their results; fix: {blocks.COMMAND}"


def test_every_table_and_every_result_file_is_on_a_page(load):
    blocks, tables = load("blocks"), load("tables")
    names = {name for page in blocks.PAGES for name in blocks.names((TOP / page).read_text())}
    assert names == set(tables.TABLES)
    assert {json.loads(path.read_text()).get("benchmark", path.stem) for path in RECORDS} <= names


def test_pictures_of_benchmarks_are_of_the_newest_results_and_on_their_page(load, tmp_path):
    charts = load("charts")
    assert not charts.differing(TOP), "fix: python benchmarks/pages"
    page = (TOP / "docs" / "benchmarks.md").read_text()
    assert set(re.findall(r"images/benchmarks/(\w+)\.svg", page)) == set(charts.CHARTS)
    top = copy_of(tmp_path, "benchmarks/results", "docs/images/benchmarks")
    result = top / "benchmarks" / "results" / "gpt.json"
    result.write_text(result.read_text().replace('"date": "20', '"date": "21'))
    assert charts.differing(top) == ["gpt"]
    picture = charts.draw("gpt", top).decode()
    assert all(arm in picture for arm in ("hpctrain, fsdp", "by hand, fully_shard"))


def test_measured_figures_are_in_tables_only(load):
    blocks = load("blocks")
    for name in blocks.PAGES:
        prose = re.sub(
            r"<!-- results:.*?end of results -->", "", (TOP / name).read_text(), flags=re.S
        )
        assert not FIGURE.findall(prose), name


def test_check_names_the_command_that_renews_a_page(tmp_path):
    copy_of(tmp_path, "README.md", "benchmarks", "docs")
    page = tmp_path / "docs" / "status.md"
    text = page.read_text()
    page.write_text(text.replace("| never |", "| here |", 1))
    assert page.read_text() != text
    done = run(tmp_path, "benchmarks/pages", "--check")
    assert done.returncode == 1, done.stderr
    assert "docs/status.md: differs from its results" in done.stdout
    assert "fix: python benchmarks/pages" in done.stdout
    assert run(tmp_path, "benchmarks/pages").stdout == "docs/status.md: written\n"
    assert page.read_text() == text


@pytest.mark.parametrize(
    "page",
    [
        "<!-- results: targets -->\n",
        "<!-- end of results -->",
        "<!-- results: x -->\n<!-- end of results -->",
    ],
    ids=["no end", "no beginning", "no such table"],
)
def test_marks_of_a_table_without_end_or_name_are_refused(load, page):
    with pytest.raises(ValueError, match=r"other mark|no table has the name x"):
        load("blocks").renew(page, TOP)


def test_benchmark_records_come_from_a_clean_tree_or_their_page_says_so(load):
    source = load("tables").source
    for path in RECORDS:
        record = json.loads(path.read_text())
        changed = record["commit"].endswith("+")
        assert record["date"] < CLEAN_SINCE or not changed, path
        assert ("uncommitted changes" in source(record)) == changed, path


def test_benchmark_page_shows_the_newest_run_of_each_arm(load, tmp_path):
    tables = load("tables")

    def record(name, date, **arms):
        figures = {
            arm: {"us": {"median": value, "low": value - 1, "high": value + 1}}
            for arm, value in arms.items()
        }
        machine = {"cpu": "CPU", "cores": 2, "load": 0.1}
        fields = {"benchmark": "startup", "date": date, "machine": machine, "commit": "abc+"}
        path = tmp_path / "benchmarks" / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**fields, "results": figures}))

    record("startup", "2026-01-01", fast=10, alone=20)
    record("startup_more", "2026-01-02", fast=30)
    table = tables.benchmark("startup", tmp_path)
    assert "| fast | 30.0 [29.0, 31.0] |" in table
    assert "| alone | 20.0 [19.0, 21.0] |" in table
    assert "10.0" not in table
    assert table.count("`abc`, uncommitted changes") == 2
    assert tables.benchmark("precision", tmp_path) == "Not measured yet."


def test_results_are_refused_in_a_tree_with_uncommitted_changes(tmp_path, capsys):
    top = copy_of(tmp_path / "top", "benchmarks/measure.py")
    spec = importlib.util.spec_from_file_location("a_copy", top / "benchmarks" / "measure.py")
    measure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure)
    inside, outside = top / "benchmarks" / "results" / "x.json", tmp_path / "x.json"
    parser = argparse.ArgumentParser()
    measure.add_save(parser)

    def refusal():
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--save", str(inside)])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "is no git repository" in refusal()
    (top / ".gitignore").write_text("__pycache__\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "all")
    (top / "benchmarks" / "new.py").touch()
    assert "uncommitted changes" in refusal()
    with pytest.raises(SystemExit, match=r"not saved: .* uncommitted changes"):
        measure.save(inside, {})
    assert not inside.exists()
    assert parser.parse_args(["--save", str(outside)]).save == outside  # accepted
    assert measure.facts([])["commit"].endswith("+")
    git(top, "add", ".")
    git(top, "commit", "-qm", "new")
    for _ in range(2):  # a saved result does not refuse the next one
        measure.save(parser.parse_args(["--save", str(inside)]).save, measure.facts([]))
    assert re.fullmatch(r"[0-9a-f]{12}", json.loads(inside.read_text())["commit"])


JUNIT = """<testsuites><testsuite>
<testcase file="{file}" classname="x" name="{test}[ddp-1]" time="1.5" />
<testcase file="{file}" classname="x" name="{test}[horovod-1]" time="2.0"><failure/></testcase>
<testcase file="{file}" classname="x" name="{test}[horovod-2]" time="0"><skipped/></testcase>
<testcase file="tests/cli/test_cli.py" classname="x" name="test_x" time="1" />
</testsuite></testsuites>"""
FACTS = {"date": "2026-12-01", "machine": "a machine", "commit": "abc", "command": "a command"}


def test_reliability_counts_tests_by_backend_and_keeps_other_rows(load, tmp_path):
    results = load("results")
    file = next(iter(results.SECTIONS))
    test = next(name for name in results.first_lines(TOP / file) if name.startswith("test_"))
    path = tmp_path / "tests.xml"
    path.write_text(JUNIT.format(file=file, test=test))
    cases = results.read(path)
    old = [
        {"file": file, "case": "manually"},
        {"file": file, "test": test, "case": "measured before"},
        {"file": "tests/other.py", "case": "of another file"},
    ]
    *kept, row = results.renew_reliability(old, cases, FACTS, part=False)
    assert kept == old[2:]
    assert row["result"] == "1 passed, 1 failed, 1 left out"
    assert (row["runs"], row["seconds"], row["commit"]) == ("Horovod 2, ddp 1", 3.5, "abc")
    assert row["what"].endswith("1, 2")
    *kept, _ = results.renew_reliability(old, cases, FACTS, part=True)
    assert kept == [old[0], old[2]]


def test_status_is_dated_where_all_tests_of_a_row_passed(load, tmp_path):
    results = load("results")
    path = tmp_path / "tests.xml"
    path.write_text(JUNIT.format(file="tests/monitoring/test_hangs.py", test="test_y"))
    rows = [
        {"component": "passed", "tests": ["tests/cli"]},
        {"component": "failed", "tests": ["tests/monitoring"]},
        {"component": "not run", "tests": ["tests/cli", "tests/data"]},
        {"component": "manually", "date": "2026-01-01"},
    ]
    cases = results.read(path)
    paths = [TOP / "tests" / "cli", TOP / "tests" / "monitoring"]
    dated, *others = results.renew_status(rows, cases, paths, FACTS)
    assert dated == {**rows[0], **{name: FACTS[name] for name in ("date", "machine", "commit")}}
    assert others == rows[1:]


def test_results_name_files_of_tests_that_exist(load):
    folder = TOP / "docs" / "results"
    named = set(load("results").SECTIONS)
    named |= {row["file"] for row in json.loads((folder / "reliability.json").read_text())["rows"]}
    for row in json.loads((folder / "status.json").read_text())["rows"]:
        named |= set(row.get("tests", ()))
        assert row["where"] == "never" or row["date"], row
    assert not [name for name in named if not (TOP / name).exists()]
