"""hpctrain top: its screen, its keys, and the terminal that it leaves behind."""

import io
import json
import os
from pathlib import Path

import fake_slurm
import pytest
from fake_slurm import job
from rich.console import Console
from terminals import Terminal

from hpctrain import cli
from hpctrain.cli.top import _do, _Screen, curve
from hpctrain.cluster import slurm
from hpctrain.jobs import job_status

WAITS = {"State": "PENDING", "NodeList": "", "Reason": "Priority"}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    own = {"UserID": str(os.getuid()), "WorkDir": os.getcwd()}
    made.jobs(job("70", **own), job("71", Name="n" * 40, **own, **WAITS))
    made.command("scancel")
    path = Path("runs/train-70")
    path.mkdir(parents=True)
    path.joinpath("run.json").write_text("{}")
    rows = ({"step": n, "loss": 1 / n, "samples_per_second": 512} for n in range(1, 90))
    path.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture
def screen(fake):
    jobs = slurm.jobs(fake.env, uid=os.getuid())
    return _Screen(job_status.listed(jobs, fake.env)[0], "", curves={"70": [3.0, 2.0, 1.0]})


def shown(screen, width=80, height=24):
    output = io.StringIO()
    console = Console(file=output, width=width, height=height)
    console.print(screen.picture(width, height, "_-^"))
    return output.getvalue().splitlines()


def test_screen_fits_the_terminal(screen):
    lines = shown(screen)
    assert lines[1].split() == ["70", "train", "running", "0:12", "47:48", "89", "0.01124", "^-_",
                                "512"]  # fmt: skip
    assert "…" in lines[2]
    assert lines[2].split()[2] == "pending"
    for width, height in ((80, 24), (80, 6), (40, 3), (200, 50)):
        lines = shown(screen, width, height)
        assert len(lines) <= max(height, 4)
        assert all(len(line) <= width for line in lines)


def test_keys_select_a_job_and_ask_before_they_change_one(screen):
    assert screen.key("\x1b[A") == ""
    assert screen.job.label == "70"
    for key in ("j", "\x1b[B"):
        assert screen.key(key) == ""
    assert screen.job.label == "71"
    assert "jobs with a higher priority are first" in "".join(shown(screen))
    for key, action in (("s", "stop"), ("c", "cancel"), ("r", "requeue")):
        assert screen.key(key) == ""
        assert shown(screen)[-1].rstrip() == f"{action} 71? y or n"
        assert screen.key("y") == action
        screen.key(key)
        assert screen.key("q") == ""
        assert screen.note == "nothing was changed"
    assert screen.key("f") == "follow"
    assert screen.key("q") == "quit"


def test_actions_of_the_keys(fake, screen):
    _do("cancel", screen)
    assert "job 70 (train) is cancelled" in screen.note
    assert "scancel 70" in fake.calls.read_text()
    _do("stop", screen)
    assert screen.note == "70 saves and stops soon"
    assert Path("runs/train-70/stop").is_file()
    _do("requeue", screen)
    assert "error" in screen.note
    screen.key("j")
    _do("stop", screen)
    assert "no run that could save" in screen.note


def test_screen_without_jobs(fake):
    assert "you have no jobs" in "".join(shown(_Screen()))
    assert [_Screen().key(key) for key in ("f", "c", "j", "y")] == ["", "", "", ""]


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([], ""),
        ([float("nan")], ""),
        ([1.0], "_"),
        ([1.0, 1.0], "__"),
        ([3.0, float("inf"), 2.0, 1.0], "^-_"),
        ([float(n) for n in range(24)], "_" * 3 + "-" * 6 + "^" * 3),
    ],
)
def test_curve_of_characters(values, shape):
    assert curve(values, "_-^") == shape


def test_top_without_a_terminal_is_refused(fake, capsys):
    assert cli.main(["top"]) == 2
    assert "or:       hpctrain status" in capsys.readouterr().err.replace("fix:", "or: ")


@pytest.mark.e2e
@pytest.mark.parametrize("last", [b"q", b"\x03", None], ids=["q", "Ctrl-C", "closed terminal"])
def test_top_shows_jobs_and_leaves_the_terminal_as_it_was(fake, last):
    """Look at the screen in a pseudo-terminal, press keys, and quit."""
    with Terminal("top") as terminal:
        terminal.shows("running")
        assert "█" in terminal.text
        terminal.press(b"\x1b[B")
        terminal.shows("jobs with a higher priority are first")
        terminal.press(b"c")
        terminal.shows("cancel 71? y or n")
        terminal.press(b"n")
        terminal.shows("nothing was changed")
        if last is None:
            terminal.close()
            terminal.process.wait(30)
        else:
            terminal.press(last)
            assert terminal.process.wait(30) == 0
            assert terminal.is_as_before()
        assert "scancel" not in fake.calls.read_text() if fake.calls.exists() else True
