"""`hpctrain completion`: shells that complete commands, options and files."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from hpctrain.cli import COMMANDS, main

# The answer of bash to TAB at the end of the words: the function of `complete -F` is called as bash
# calls it.
TAB = """
eval "$1"; shift
name=$(complete -p hpctrain) name=${name##*-F } name=${name%% *}
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
"$name" hpctrain "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(lacking, capsys):
    """Return a function that returns the script of a shell."""
    if importlib.util.find_spec("shtab") is None:
        lacking("shtab", "no module named shtab")

    def script_of(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return script_of


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("st",), ["status"]),
        (("",), [*COMMANDS]),
        (("run", "--as", "sl"), ["slurm"]),
        (("submit", "--nodes", "2", "--parti"), ["--partition"]),
        (("run", "--nproc-per-node", "2", "tra"), ["train.py"]),
        (("run", "--run-dir", "ru"), ["runs"]),
        (("lint", "job.s"), ["job.sh"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bash_completes(words, found, script, tmp_path):
    for name in ("train.py", "job.sh", "job.toml"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    command = ["bash", "-c", TAB, "bash", script("bash"), "hpctrain", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.split()) == sorted(found), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_of_the_other_shells_can_be_read_by_them(shell, script, lacking, tmp_path):
    path = tmp_path / "script"
    path.write_text(script(shell))
    for part in (*COMMANDS, "nproc-per-node", "gpus-per-node"):
        assert part in path.read_text()
    if shutil.which(shell) is None:
        lacking(shell, f"no {shell} on the PATH")
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_completion_without_shtab_is_one_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("hpctrain: error: shtab cannot be imported")
    assert "  fix:      pip install 'hpctrain[completion]'" in lines
