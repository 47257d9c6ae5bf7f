"""Ranks of the next attempt, which wait until it begins."""

import os
import subprocess
import sys

import pytest

from hpctrain.launch.standby import Standby, command_that_waits

SCRIPT = """
import json, multiprocessing, os, sys
main = sys.modules["__main__"]
print(json.dumps([
    sys.argv, sys.path[0], __name__, getattr(main, "__file__", None), os.read(0, 1).decode(),
    __spec__ and __spec__.name, open("/proc/self/oom_score_adj").read(), type(main).__name__,
]))
if "fail" in sys.argv:
    raise SystemExit(7)
"""


def run(words, folder, given=b"gggg"):
    return subprocess.run(
        words, input=given, capture_output=True, cwd=folder, timeout=60, check=False
    )


@pytest.fixture
def program(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tool.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    "words", [["../train.py", "--lr", "0.1"], ["-m", "tool", "fail"], ["-P", "-m", "json.tool"]]
)
def test_rank_that_waited_runs_its_program_as_python_does(program, words):
    folder = program / "work"
    expected = run([sys.executable, *words], folder, b"")
    waited = run(command_that_waits([sys.executable, *words], ["colorsys", "no_such"]), folder)
    assert waited.stdout == expected.stdout
    assert waited.returncode == expected.returncode
    assert waited.stderr == expected.stderr or words[0] == "-P"


def test_rank_that_is_not_needed_does_nothing(program):
    words = command_that_waits([sys.executable, str(program / "train.py")], [])
    done = run(words, program, b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    "words", [["bash", "train.sh"], ["python3"], ["python3", "-c", "1"], ["python3", "-u", "a.py"]]
)
def test_programs_that_do_not_wait(words):
    assert command_that_waits(words, []) is None


def standby(folder, *words):
    return Standby.start(["a", "b"], folder, (list(words), dict(os.environ), folder / "exit"))


def test_begin_of_ranks_that_wait(tmp_path):
    waiting = standby(tmp_path, "wc", "-c")
    assert not waiting.begin(["a"])
    assert waiting.begin(["a", "b"])
    assert int(waiting.rank.process.stdout.read()) >= 1024  # a byte for each rank of a host
    waiting.end()
    waiting.wait()
    assert not waiting.begin(["a", "b"])


@pytest.mark.parametrize("words", [["true"], ["cat"], ["sh", "-c", "trap '' TERM; cat; echo on"]])
def test_end_of_ranks_that_are_not_needed(tmp_path, words):
    waiting = standby(tmp_path, *words)
    waiting.end()
    waiting.wait()
    assert waiting.rank.process.returncode is not None
    assert not waiting.begin(["a", "b"])
