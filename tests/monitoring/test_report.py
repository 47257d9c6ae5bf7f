"""The page of `hpctrain report`: its content, its errors, and its view in a real browser."""

import base64
import errno
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.monitoring.report import runs

ATTACK = "</script></style><img src=x onerror=alert(1)>'\"&$\\frac{\x1b[2J\u202e"
WORLD = {"world_size": 3, "num_nodes": 2, "hosts": ["node1", "node2"], "launcher": "slurm"}
VERSIONS = {"hpctrain": "0.1.0", "python": "3.11.7", "torch": "2.6.0"}
OPTIONS = {"lr": 0.1, "epochs": 3, "workers": None, "deterministic": False}
HOSTS = ["node1", "node1", "node2"]


def start(step=0, time=1.7e9, options=OPTIONS, **more):
    command = ["train.py", "--lr", str(options.get("lr"))]
    fields = {"time": time, "command": command, "options": options, "step": step}
    return {**fields, "versions": VERSIONS, "commit": "c0ffee" * 6, "world": WORLD, **more}


def rows(count=30, **more):
    for step in range(10, 10 * count + 1, 10):
        values = {"loss": 2 / step, "lr": 0.1, "samples_per_second": 900.0 + step, **more}
        yield {"step": step, "epoch": 0, "time": 1.7e9 + step, **values}
        if step % 100 == 0:
            yield {"step": step, "epoch": 0, "time": 1.7e9 + step, "top1": 0.5, "eval_loss": 1.0}


def interval(data=(0.001, 0.001, 0.05), **more):
    fields = {"steps": 100, "hosts": HOSTS, "data": list(data), "forward": [0.01] * 3}
    return {**fields, "step_times": {"80": 90, "85": 9, "100": 1}, **more}


def run(folder, lines=None, starts=None, intervals=(), summary=None, identity=None):
    """Write a run directory as sessions do; return its path."""
    folder.mkdir()
    fields = {"name": "train", "data": "digits", "world": WORLD}
    (folder / "run.json").write_text(json.dumps({**fields, **(identity or {})}))
    content_of_files = {
        "metrics": rows() if lines is None else lines,
        "starts": starts or [start()],
        "timings": intervals,
    }
    for name, content in content_of_files.items():
        text = "".join(json.dumps(line) + "\n" for line in content)
        (folder / f"{name}.jsonl").write_text(text)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


DONE = {
    "status": "done",
    "step": 300,
    "epoch": 3,
    "seconds": 65.0,
    "samples_per_second": 1234.5,
    "backend": "ddp",
    "precision": "bf16",
    "metrics": {},
}


@pytest.fixture
def full_run(tmp_path):
    """Return a run with all kinds of data: three starts, a slow rank, a GPU."""
    changed = {**OPTIONS, "lr": 0.2}
    starts = [
        start(),
        start(100, 1.7e9 + 150, changed, device="NVIDIA H200"),
        start(
            200,
            1.7e9 + 250,
            changed,
            own_options={"model": "resnet50", "note": ATTACK},
            device="NVIDIA H200",
        ),
    ]
    lines = rows(data_wait=0.25, gpu_memory=12e9)
    return run(tmp_path / "full", lines, starts, [interval(), interval()], DONE)


def open_page(browser, page, **more):
    """Open the page in a browser; check that it reports no error and loads no other file."""
    opened = browser.open(page, **more)
    assert browser.undecoded() == []
    assert browser.messages == []
    assert browser.requests == [page.resolve().as_uri()]
    return opened


def drawing(page, number):
    """Return the SVG of a figure of the page."""
    address = page.locator("img").nth(number).get_attribute("src")
    return base64.b64decode(address.partition(",")[2]).decode()


def report(*arguments):
    return main(["report", *map(str, arguments)])


def test_report_of_one_run_in_a_browser(full_run, browser, capsys):
    assert report(full_run) == 0
    page = full_run / "report.html"
    assert str(page) in capsys.readouterr().out
    opened = open_page(browser, page)
    assert opened.title() == "train: full"
    assert opened.locator("script, [onerror], [src=x]").count() == 0
    text = opened.inner_text("body")
    for words in (
        "done",
        "1,234 samples/s",
        "0:01:05",
        "NVIDIA H200",
        "bf16",
        "resnet50",
        "</script>",
    ):
        assert words in text
    headings = opened.eval_on_selector_all("h2", "all => all.map(one => one.textContent)")
    wanted = ["Summary", "Curves", "Time of a step", "Configuration", "Launches"]
    assert headings == wanted
    alts = opened.eval_on_selector_all("img", "all => all.map(one => one.alt)")
    assert alts[0] == "loss over steps: loss, eval_loss."
    assert [alt.split(" over steps: ")[0] for alt in alts[1:]] == [
        *("accuracy", "learning rate", "throughput (samples/s)"),
        *("waiting for data (share of the time)", "GPU memory, peak of rank 0"),
    ]
    # Two restarts in every curve over steps, and in a table with the changes.
    for number in range(6):
        assert drawing(opened, number).count("stroke-dasharray") == 2
    assert "lr: 0.1 → 0.2" in text
    assert "model: – → resnet50" in text
    terms = opened.eval_on_selector_all("dt", "all => all.map(one => one.textContent)")
    values = opened.eval_on_selector_all("dd", "all => all.map(one => one.textContent)")
    facts = dict(zip(terms, values, strict=True))
    assert facts["waiting for data, median rank"] == "1 ms"
    assert facts["waiting for data, slow ranks"] == "rank 2 on node2: up to 50 ms"
    assert "forward pass, slow ranks" not in facts


@pytest.mark.slow
def test_report_page_is_light_dark_and_printable(full_run, browser):
    report(full_run)
    ink = "getComputedStyle(document.body).color"
    image = "getComputedStyle(document.images[0]).filter"
    seen = {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        page = open_page(browser, full_run / "report.html", scheme=scheme, media=media)
        assert browser.overflow() == 0
        seen[scheme, media] = page.evaluate(ink), page.evaluate(image)
    assert seen["light", "screen"][1] == "none"
    assert seen["dark", "screen"][0] != seen["light", "screen"][0]
    assert seen["dark", "screen"][1].startswith("invert")  # dark text would be invisible
    assert seen["dark", "print"] == seen["light", "screen"]


@pytest.mark.slow
def test_report_compares_runs_and_marks_differing_options(tmp_path, browser, full_run):
    fast = run(
        tmp_path / "fast",
        [{"step": 5, "time": 1.0, "loss": 1.0, "my own": 3}],
        [start(options={**OPTIONS, "lr": 0.4})],
    )
    assert report(full_run, fast, full_run) == 0
    page = open_page(browser, tmp_path / "report.html")
    assert page.title() == "2 runs compared"
    heads = page.eval_on_selector_all(
        "section:has(#configuration) thead th", "all => all.map(one => one.textContent)"
    )
    assert heads == ["", "full", "fast"]
    losses = page.inner_text("section:has(#summary) table:has(caption:text-is('Metrics'))")
    assert re.findall(r"^loss\s+(\w+)\s+(\S+)", losses, re.MULTILINE) == [
        *(("full", "0.00666667"), ("fast", "1"))
    ]
    marked = page.eval_on_selector_all(".differs", "all => all.map(one => one.innerText)")
    marked = [line.split() for line in marked]
    assert ["≠", "lr", "0.2", "0.4"] in marked
    assert ["≠", "model", "resnet50", "–"] in marked
    assert not any("epochs" in line for line in marked)
    alts = page.eval_on_selector_all("img", "all => all.map(one => one.alt)")
    assert "loss over steps: full, fast." in alts
    assert "my own over steps: fast." in alts


@pytest.mark.slow
def test_report_escapes_every_name(tmp_path, browser):
    options = {"lr": ATTACK, ATTACK: {"deep": [ATTACK]}, "long": "x" * 10**5, "one": "\ud800"}
    world = {**WORLD, "hosts": [ATTACK, 7]}
    folder = run(
        tmp_path / "<img src=x onerror=alert(2)>",
        [*rows(3), {"step": 40, ATTACK: 1, "loss": 2.0}, {"step": 50, ATTACK: 2, "y" * 9999: 1}],
        [
            start(options=options, world=world, command=["x" * 5000]),
            start(step=[], commit={}, versions=ATTACK),
        ],
        [interval(hosts=[ATTACK] * 3)],
        {"status": ATTACK, "reason": ATTACK, "step": ATTACK, "samples_per_second": ATTACK},
        {"name": ATTACK},
    )
    other = run(tmp_path / "other")
    for arguments in ((folder,), (folder, other)):
        assert report(*arguments, "--output", tmp_path / "page.html") == 0
        for width in (800, 360):
            page = open_page(browser, tmp_path / "page.html", width=width)
            assert browser.overflow() == 0
        assert page.locator("script, [onerror], [src=x]").count() == 0
        assert "</script></style><img src=x onerror=alert(1)>" in page.inner_text("body")


@pytest.mark.slow
def test_report_of_a_running_job_with_bad_lines_and_numbers(tmp_path, browser):
    bad = [
        {"step": 30, "loss": math.nan, "lr": math.inf},
        *({"step": 40, "loss": math.inf}, {"step": 50, "loss": 1e308}, {"step": 60, "loss": True}),
        *({"step": "x", "loss": 3.0}, {"loss": 3.0}),
        {"step": 70, "epoch": 1, "time": 1.7e9 + 70, "loss": 4.0},
    ]
    folder = run(tmp_path / "going-on", [*rows(2), *bad])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[1]\nnull\n\xff\n" + "[" * 10**5 + '\n{"step": 80, "lo')
    (folder / "timings.jsonl").write_text(
        '{"steps": 0}\n{"steps": 5, "hosts": "x", "data": [1], "forward": [1]}\n'
        '{"steps": 5, "hosts": [], "data": [], "forward": []}\n{"step_times": {"9999": 1, "x": 1}}'
        '\n{"steps": 5, "hosts": ["a"], "data": [NaN], "forward": [1]}\n{"step_times": [1]'
    )
    report(folder)
    text = open_page(browser, folder / "report.html").inner_text("body")
    assert "going-on has not ended" in text
    assert "Its last row is of 2023-11-14 22:14:30 UTC" in text
    assert "some values of loss, lr are not finite." in text
    assert "6 (2 not finite)" in text
    assert "Time of a step" not in text


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("summary", '{"sta', "Unterminated string"),
        *(
            pytest.param("run", content, reason, marks=pytest.mark.slow)
            for content, reason in (
                ("[" * 10**5 + "]" * 10**5, "maximum recursion depth exceeded"),
                ("", "Expecting value"),
            )
        ),
    ],
    ids=["cut", "too deep", "empty"],
)
def test_report_refuses_a_run_with_an_unreadable_file(full_run, name, content, reason, capsys):
    (full_run / f"{name}.json").write_text(content)
    assert report(full_run) == 2
    error = capsys.readouterr().err
    assert f"full/{name}.json cannot be read: {reason}" in error
    assert "hpctrain explain HT701\n" in error


def test_report_refuses_a_pipe(full_run, capsys):
    (full_run / "metrics.jsonl").unlink()
    os.mkfifo(full_run / "metrics.jsonl")
    assert report(full_run) == 2
    assert "no regular file" in capsys.readouterr().err


@pytest.mark.slow
def test_report_of_a_run_without_metrics(tmp_path, browser):
    folder = run(tmp_path / "young", [])
    (folder / "starts.jsonl").unlink()
    report(folder)
    text = open_page(browser, folder / "report.html").inner_text("body")
    assert "No row of metrics has been written so far." in text


def test_report_long_curve_keeps_peaks_and_median():
    page = importlib.import_module("hpctrain.monitoring.report.page")
    steps = np.arange(200_000.0)
    values = np.where(steps == 123_456, 99.0, 1.0 + steps % 2)
    points, low, middle, high = page.reduced(steps, values)
    assert len(points) == 400
    assert (low.min(), high.max()) == (1.0, 99.0)
    assert set(middle) <= {1.0, 1.5, 2.0}
    assert all(len(one) == 800 for one in page.reduced(steps[:800], values[:800]))


def test_report_compares_ranks_of_the_last_launch():
    lines = [
        interval(),
        *({**interval(), "steps": "x"}, {**interval(), "step_times": {"80": None}}),  # omitted
        *({**interval(), "hosts": ["a", "b"], "data": [0.1, 0.3], "forward": [1, 2]} for _ in "ab"),
        {**interval(), "hosts": ["a", "b"], "data": [0.5], "forward": [1]},  # omitted
        {**interval(), "hosts": ["a", "b"], "data": [0.4, 0.6], "forward": [1, 2], "steps": 200},
    ]
    times = runs.times(lines)
    assert times.nodes == ["a", "b"]
    assert times.means[0] == pytest.approx([0.25, 0.45])
    assert times.steps == 400
    assert times.buckets.total() == 400
    # Bucket 80 begins at 10 ms, and is 1/20 of a decade wide.
    assert times.quantile(0.5) == pytest.approx(0.01 * 10**0.05)
    assert times.quantile(1.0) == pytest.approx(0.1 * 10**0.05)


def test_report_replaces_only_a_report(full_run, tmp_path, capsys):
    page = full_run / "report.html"
    assert report(full_run) == 0
    (full_run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.5}\n')
    assert report(full_run) == 0
    assert "1.5 at step 1" in page.read_text()
    for replace in (
        lambda: page.write_text("<p>manually</p>"),
        lambda: (page.unlink(), os.mkfifo(page)),
    ):
        replace()
        before = page.lstat()
        assert report(full_run) == 2
        assert f"{page} exists and is not a report" in capsys.readouterr().err
        after = page.lstat()
        # Not the time of the last access: the report is read to see what it is.
        assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
        assert after.st_mtime_ns == before.st_mtime_ns


@pytest.mark.slow
def test_report_keeps_the_old_page_when_the_disk_is_full(full_run, monkeypatch):
    report(full_run)
    before = (full_run / "report.html").read_bytes()

    def raise_no_space(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_no_space)
    assert report(full_run) == 2
    assert (full_run / "report.html").read_bytes() == before


def test_report_refusals_come_with_a_fix(full_run, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, fix, code in (
        (["no-such"], "'no-such' is n", "HT818"),  # with other words where Slurm is there
        (["no/such"], "no run is in no/such", "HT655"),
        (["folder"], "no run is in folder", "HT655"),
        (["file"], "no run is in file", "HT655"),
        (["file", "folder"], "no run is in file", "HT655"),
        ([full_run, "no/such"], "no run is in no/such", "HT655"),
        ([full_run, "--output", "page"], "--output page.html", "HT654"),
        ([full_run, "--output", "file/page.html"], "--output FILE", "HT654"),
    ):
        assert report(*arguments) == 2
        error = capsys.readouterr().err
        assert fix in error
        assert f"hpctrain explain {code}\n" in error
    for module in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert report(full_run) == 2
        error = capsys.readouterr().err
        assert "pip install 'hpctrain[report]'\n  more:     hpctrain explain HT651\n" in error


def test_report_of_a_pattern_skips_logs_and_folders_without_a_run(full_run, tmp_path, capsys):
    for task in (2, 10):
        shutil.copytree(full_run, f"runs/lrs-58_{task}")
        Path(f"runs/lrs-58_{task}.log").write_text("a log\n")
    Path("runs/lrs-58_3").mkdir()
    assert report(*sorted(map(str, Path("runs").glob("lrs-*"))), "--output", "r.html") == 0
    skipped = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert skipped == [f"runs/lrs-58_{one}" for one in ("10.log", "2.log", "3")]
    page = Path("r.html").read_text()
    assert page.index("lrs-58_10<") < page.index("lrs-58_2<")
    # By the number of the array, which Slurm may have forgotten.
    assert report("58") == 0
    page = Path("report.html").read_text()
    assert page.index("lrs-58_2<") < page.index("lrs-58_10<")
    assert Path("runs/lrs-58_2.log").read_text() == "a log\n"


@pytest.mark.slow
def test_report_needs_no_torch_and_ignores_matplotlibrc(full_run):
    (full_run / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: black\n")
    code = (
        "import sys; from hpctrain.__main__ import main; code = main();"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(full_run)],
        env={**os.environ, "LC_ALL": "C", "MATPLOTLIBRC": str(full_run)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "written by hpctrain report" in (full_run / "report.html").read_text()[:2000]
