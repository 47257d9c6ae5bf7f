"""hpctrain top: its screen, how it ends, and the terminal that it leaves behind."""

import io
import json
import os
import signal
import sys
from pathlib import Path

import fake_slurm
import pytest
from fake_slurm import job
from rich.console import Console
from terminals import Terminal

from hpctrain import cli
from hpctrain.cli import top
from hpctrain.cluster.slurm.shared_jobs import SharedJobs

WAITS = {"State": "PENDING", "NodeList": "", "Reason": "Priority"}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a Slurm with jobs 70, at step 89 of 178, and 71, which waits; and a failed run."""
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    own = {"UserID": str(os.getuid()), "WorkDir": os.getcwd()}
    made.jobs(job("70", **own), job("71", Name="n" * 40, **own, **WAITS))
    for name in ("train-70", "old"):
        path = Path("runs", name)
        path.mkdir(parents=True)
        path.joinpath("run.json").write_text("{}")
        rows = ({"step": n, "loss": 1 / n, "samples_per_second": 512} for n in range(1, 90))
        path.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.joinpath("summary.json").write_text('{"status": "failed"}')
    last = {"time": 1.0, "event": "last step", "step": 89, "end": 178, "left": 8.2}
    Path("runs/train-70/last-step.json").write_text(json.dumps(last))
    return made


def shown(width=80, **options):
    output = io.StringIO()
    console = Console(file=output, width=width, **options)
    console.print(top._picture(*top._query(SharedJobs(os.environ), {}), width))
    return output.getvalue()


@pytest.mark.parametrize("width", [80, 130])
def test_top_shows_the_newest_first_with_a_bar_and_an_eta(fake, width):
    head, runs, waits, old, *_ = shown(width).splitlines()
    assert [runs.split()[0], waits.split()[0]] == ["70", "71"]
    assert runs.split()[1:3] == ["train", "running"]
    assert "━━━━━ ETA 0:08; 50 % runs/train-70" in " ".join(runs.split())
    assert "ETA" not in old + waits
    assert old.split()[:2] == ["failed", "89"]
    assert "jobs with" in waits
    assert ("SAMPLES/S" in head) == ("512" in runs) == (width == 130)
    assert all(len(line) <= width for line in shown(width).splitlines())


def test_top_shows_what_runs_before_what_waits_and_what_has_ended(fake):
    own = {"UserID": str(os.getuid()), "WorkDir": os.getcwd()}
    ended = {**own, "State": "COMPLETED"}
    fake.jobs(
        job("60", **own), job("61", **ended), job("62", **own, **WAITS), job("63", **own),
        job("64", **ended), job("65", **own, **WAITS),
    )  # fmt: skip
    lines = shown(200).splitlines()[1:]
    assert [line.split()[0] for line in lines[:6]] == ["63", "60", "65", "62", "64", "61"]


def test_top_has_the_names_of_status(fake, capsys):
    cli.main(["status"])
    texts = [capsys.readouterr().out, shown(200)]
    for end in ("runs/train-70", "runs/old"):
        status, screen = ({*line.split()} for text in texts for line in text.splitlines()
                          if line.rstrip().endswith(end))  # fmt: skip
        assert screen - {"━" * 5, "ETA", "0:08;", "50", "%"} <= status


def test_job_that_waits_again_has_a_bar_and_no_eta(fake):
    own = {"UserID": str(os.getuid()), "WorkDir": os.getcwd()}
    fake.jobs(job("70", **own, **WAITS, RestartCnt="1"))
    line = shown().splitlines()[1]
    assert "━━━━━" in line
    assert "50 %" in line
    assert "ETA" not in line


def test_states_have_colours(fake):
    text = shown(force_terminal=True, color_system="standard")
    for colour, state in ((32, "running"), (33, "pending"), (31, "failed")):
        assert f"\x1b[{colour}m{state}" in text


def test_top_without_jobs_and_without_slurm(fake, tmp_path, monkeypatch):
    fake.jobs()
    monkeypatch.chdir(tmp_path / "fakes")
    assert "no jobs of yours" in shown()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "Slurm does not answer: no squeue on the PATH" in shown()


def test_run_of_a_job_is_not_called_interrupted_while_slurm_is_silent(fake, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "interrupted" not in shown()
    assert "ETA 0:08" in shown()


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (8.2, "0:08"), (119.7, "2:00"), (3723, "1:02:03")]
)
def test_eta_has_hours_only_if_it_needs_them(seconds, text):
    assert top._clock(seconds) == text


def test_top_without_a_terminal_or_rich_is_one_error(fake, capsys, monkeypatch):
    assert cli.main(["top"]) == 2
    assert "  fix:      hpctrain status\n" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert cli.main(["top"]) == 2
    assert "  fix:      pip install rich\n" in capsys.readouterr().err


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["", "ignored"])
def inherited(request):
    """Set what top inherits for SIGINT and SIGHUP, as from nohup."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number in before:
        signal.signal(number, request.param)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.e2e
@pytest.mark.parametrize("last", [b"\x03", None], ids=["Ctrl-C", "closed terminal"])
def test_top_ends_at_once_and_leaves_the_terminal_as_it_was(fake, last, inherited):
    """Look at the screen in a pseudo-terminal, and quit."""
    with Terminal("top") as terminal:
        terminal.shows("running")
        assert "━" in terminal.text
        if last is None:
            terminal.close()
            terminal.process.wait(30)
        else:
            terminal.press(last)
            assert terminal.process.wait(30) == 0
            assert terminal.is_as_before()
