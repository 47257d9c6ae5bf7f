"""Commands with a time limit."""

import os
import time

import pytest

from hpctrain.cluster import commands


def test_command_output_and_exit_code(tmp_path):
    command = ["sh", "-c", "cat; pwd >&2; exit 3"]
    done = commands.run(command, 10, folder=tmp_path, text=b"a\r\n\xff")
    assert (done.returncode, done.stdout) == (3, "a\r\n\udcff")
    assert done.stderr == f"{tmp_path}\n"
    assert commands.run(["sh", "-c", "kill -9 $$"], 10).returncode == -9


def test_command_environment_and_empty_input():
    env = {"PATH": os.environ["PATH"], "NAME": "value"}
    assert commands.run(["sh", "-c", "cat; echo $NAME"], 10, env).stdout == "value\n"


def test_command_that_is_missing_or_late(tmp_path):
    with pytest.raises(commands.NoAnswerError, match="no absent on the PATH"):
        commands.run(["absent"], 10, {"PATH": str(tmp_path)})
    with pytest.raises(commands.NoAnswerError, match="Permission denied"):
        commands.run([str(tmp_path)], 10)
    begun = time.monotonic()
    with pytest.raises(commands.LateAnswerError, match="sleep: no answer within 0 s"):
        commands.run(["sleep", "30"], 0.1)
    assert time.monotonic() - begun < 10


def test_git_outside_of_a_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commands.git(tmp_path, "rev-parse", "HEAD") is None
    assert commands.git(tmp_path, "--version").startswith("git version")
    assert commands.git(tmp_path / "absent", "--version") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commands.git(tmp_path, "--version") is None
