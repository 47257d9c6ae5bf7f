"""A rank that has the terminal of `hpctrain run`."""

from pathlib import Path

import pytest
from terminals import Terminal

from hpctrain.cli import main

SCRIPT = """
import os, sys
answer = 41
if os.environ["RANK"] == os.environ.get("OF", "0"):
    print(f"{sys.stdin.isatty()} {sys.stdout.isatty()}")
    breakpoint()
print("the answer of", os.environ["RANK"], "is", answer + 1)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_breakpoint_of_a_rank_reads_from_the_terminal(script, monkeypatch, rank):
    words = [] if rank is None else ["--nproc-per-node", "2", "--debug-rank", str(rank)]
    monkeypatch.setenv("OF", str(rank or 0))
    with Terminal("run", *words, script) as terminal:
        terminal.shows("(Pdb)")
        terminal.press(b"answer = 6\n")
        terminal.press(b"continue\n")
        terminal.shows(f"the answer of {rank or 0} is 7")
        assert terminal.process.wait(60) == 0
    assert "True True" in terminal.text
    if rank is not None:
        assert f"{1 - rank}: the answer of {1 - rank} is 42" in terminal.text


@pytest.mark.parametrize("caught", [False, True])
def test_ctrl_c_ends_the_rank_of_a_terminal_once(tmp_path, caught):
    (tmp_path / "train.py").write_text(
        "import time\n"
        "print('begins')\n"
        "try:\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('caught')\n"
        f"    if not {caught}: raise\n"
        "time.sleep(0.2)\n"
        "print('done')\n"
    )
    with Terminal("run", "train.py") as terminal:
        terminal.shows("begins")
        terminal.press(b"\x03")
        assert terminal.process.wait(60) == (0 if caught else 130)
        terminal.shows("done" if caught else "KeyboardInterrupt")
    assert terminal.text.count("caught") == 1


@pytest.mark.parametrize("rank", ["-1", "2"])
def test_rank_that_does_not_exist_is_refused(script, capsys, rank):
    assert main(["run", "--nproc-per-node", "2", "--debug-rank", rank, script]) == 2
    assert f"--debug-rank {rank}" in capsys.readouterr().err


def test_rank_on_another_host_has_no_terminal(script, capsys):
    of_hosts = ["--nodes", "2", "--node-rank", "0", "--main-address", "h0", "--main-port", "8888"]
    assert main(["run", *of_hosts, "--debug-rank", "0", script]) == 2
    assert "--debug-rank where the ranks are in a job" in capsys.readouterr().err
    assert not list(Path().glob("runs"))
