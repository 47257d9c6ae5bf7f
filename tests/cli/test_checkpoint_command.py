"""`hpctrain checkpoint show`: what checkpoints a run has, and what is damaged."""

import pytest
from checkpoints import two_checkpoints

from hpctrain.cli import main


@pytest.fixture
def run(tmp_path):
    return two_checkpoints(tmp_path / "run")


def show(capsys, run, *options):
    """Return exit code and lines of the command."""
    code = main(["checkpoint", "show", str(run.path), *options])
    shown = capsys.readouterr()
    return code, shown.out.splitlines(), shown.err


def test_checkpoints_are_listed_with_their_sizes(run, capsys):
    code, lines, _ = show(capsys, run)
    assert code == 0
    size = sum(p.stat().st_size for p in run.checkpoint(1).iterdir() if p.suffix != ".json")
    assert [line.split() for line in lines] == [
        ["step", "files", "bytes", "state"],
        ["1", "3", f"{size:,}", "complete"],
        ["2", "3", f"{size:,}", "complete"],
    ]


def test_tensors_of_a_checkpoint_are_listed(run, capsys):
    code, lines, _ = show(capsys, run, "--step", "2")
    assert code == 0
    assert lines[-1].split() == ["model.weight", "float32", "6", "24", "1"]


@pytest.mark.parametrize("name", ["rank-00000.bin", "model.pt", "manifest.json"])
def test_damaged_file_is_named(run, capsys, name):
    path = run.checkpoint(2) / name
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    code, lines, _ = show(capsys, run)
    assert code == 1
    assert lines[1].endswith("complete")
    assert lines[2].endswith("damaged")
    assert str(run.checkpoint(2)) in lines[3]
    assert (name in lines[3]) == (name != "manifest.json")
    path.unlink()
    code, lines, _ = show(capsys, run, "--step", "2")
    assert code == 1


def test_run_without_checkpoints(run, tmp_path, capsys):
    code, _, error = show(capsys, run, "--step", "7")
    assert code == 1
    assert "no checkpoint of step 7" in error
    assert main(["checkpoint", "show", str(tmp_path / "none")]) == 1
