"""`hpctrain init`: a first training script, and a batch script for the cluster at hand."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import ranks
from fake_slurm import FakeSlurm
from terminals import Terminal

from hpctrain.cli import main
from hpctrain.jobs.lint import lint

TOP = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """Work in an empty folder, without Slurm and the settings of this shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "SBATCH_PARTITION", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    """A cluster with hosts without GPUs by default, and 8 hosts of 4 GPUs."""
    fake = FakeSlurm(tmp_path_factory.mktemp("slurm")).installed(monkeypatch)
    fake.command(
        "sinfo",
        "cpu*|1:00:00|40|up|8|32000|(null)\nold|1:00|9|down|8|32000|gpu:8\n"
        "v100|1:00|5|up|8|32000|gpu:v100:4(S:0)\nv100|1:00|3|up|8|64000|gpu:v100:4(S:0)",
    )
    return fake


def directives(path="train.sbatch"):
    lines = Path(path).read_text().splitlines()
    return [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]


def test_init_without_slurm_writes_a_plain_batch_script_that_lint_accepts(capsys):
    assert main(["init", "new/folder"]) == 0
    script, batch = (Path("new/folder", name) for name in ("train.py", "train.sbatch"))
    assert script.read_text() == (TOP / "examples" / "mnist.py").read_text()
    found = directives(batch)
    assert "nodes=1" in found
    assert "time=01:00:00" in found
    assert not [line for line in found if line.startswith(("partition", "account", "gpus"))]
    assert lint(batch.read_text(), batch.parent) == []
    out = capsys.readouterr().out
    assert "cd new/folder; python train.py --max-steps 100" in out
    assert "cd new/folder; sbatch train.sbatch" in out


def test_init_asks_slurm_for_the_partition_with_the_gpus_and_for_the_account(cluster, monkeypatch):
    cluster.command("sacctmgr", "physics")
    monkeypatch.setenv("VIRTUAL_ENV", "/home/me/env")
    assert main(["init", "--kind", "text", "--hosts", "2x4", "--time", "90m"]) == 0
    found = directives()
    assert {"nodes=2", "gpus-per-node=4", "ntasks-per-node=4", "time=01:30:00"} <= {*found}
    assert {"partition=v100", "account=physics"} <= {*found}
    assert ". /home/me/env/bin/activate" in Path("train.sbatch").read_text()
    assert "class GPT" in Path("train.py").read_text()
    assert lint(Path("train.sbatch").read_text(), Path()) == []


@pytest.mark.usefixtures("cluster")
def test_init_leaves_open_what_slurm_does_not_say():
    assert main(["init"]) == 0
    assert "partition=cpu" in directives()  # the default one, whose hosts have no GPUs
    Path("train.py").rename("other.py")
    Path("train.sbatch").unlink()
    assert main(["init", "--hosts", "9x4"]) == 0  # more than any partition that is up has
    assert not [line for line in directives() if line.startswith(("partition", "account"))]


@pytest.mark.parametrize("name", ["train.py", "train.sbatch"])
def test_init_overwrites_no_file(name, capsys):
    Path(name).write_text("mine")
    assert main(["init"]) == 2
    assert capsys.readouterr().err.startswith(f"hpctrain: error: {name} exists already\n")
    assert [path.name for path in Path().iterdir()] == [name]
    assert Path(name).read_text() == "mine"


@pytest.mark.parametrize("words", [("--hosts", "0x4"), ("--hosts", "two"), ("--time", "soon")])
def test_init_refuses_an_answer_that_it_cannot_read(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["init", *words])
    assert caught.value.code == 2
    assert f"{words[1]!r} is no " in capsys.readouterr().err
    assert not [*Path().iterdir()]


@pytest.mark.e2e
def test_init_asks_three_questions_on_a_terminal(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin:/nowhere")
    with Terminal("init") as terminal:
        terminal.shows("images or text? [images] ")
        terminal.press(b"sound\n")
        terminal.shows("'sound' is no kind of training: images or text")
        terminal.press(b"text\n")
        terminal.shows("Hosts, and GPUs of each? [")
        terminal.press(b"3x2\n")
        terminal.shows("Time limit of the job? [1h] ")
        terminal.press(b"\n")
        terminal.shows("sbatch train.sbatch")
        assert terminal.process.wait(60) == 0
    assert {"nodes=3", "gpus-per-node=2", "time=01:00:00"} <= {*directives()}
    assert "class GPT" in Path("train.py").read_text()


def train(*options):
    sys.argv = ["train.py", "--max-steps", "3", "--run-dir", "run", *options]
    runpy.run_path("train.py", run_name="__main__")


@pytest.mark.parametrize("kind", ["images", "text"])
def test_script_of_init_trains_as_it_is(kind):
    assert main(["init", "--kind", kind]) == 0
    ranks.values(ranks.run(1, train))
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("done", 3)
