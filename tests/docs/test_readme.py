"""The commands, the diff and the numbers of the README."""

import json
import os
import re
import shutil
import subprocess

import launches
import pytest
import readme

COMMANDS = readme.commands()
STARTED_HERE = ("python", "hpctrain", "torchrun", "mpirun", "horovodrun")
LOCAL = [
    line
    for line in COMMANDS
    if line.split()[0] in STARTED_HERE and not line.startswith(readme.JOBS)
]
BY_DEFAULT = [line for line in LOCAL if line.startswith("python examples/mnist.py --epochs 2")]
PATH = f"{launches.BIN}:{os.environ['PATH']}"
# Open MPI's variables that let root run it in a container.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LAUNCHERS = {"laptop", "srun", "sbatch", "torchrun", "mpirun", "horovodrun", "submitit", "notebook"}


def test_readme_is_short_and_has_a_line_for_each_launcher():
    assert len(readme.TEXT.splitlines()) < 200
    rows = re.findall(r"^\| (?:an? )?(\w+).* \| .*`.*` *.*\|$", readme.TEXT, re.MULTILINE)
    assert set(rows) >= LAUNCHERS


def test_readme_pictures_are_small_and_name_no_place():
    names = re.findall(r'(?:srcset|src)="([^"]+)"', readme.TEXT)
    assert len(names) == 4
    for name in names:
        picture = (launches.TOP / name).read_bytes()
        assert len(picture) < 200_000, name
        if name.endswith(".svg"):
            text = picture.decode()
            assert not re.search(r"url\(.?http|href", text), f"{name} needs another server"
            assert "/tmp" not in text, name
            assert "/home" not in text, name


def test_readme_diff_is_that_of_the_mnist_examples():
    done = subprocess.run(
        ["diff", "-w", "-U0", "examples/mnist_plain.py", "examples/mnist.py"],
        cwd=launches.TOP,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [
        line
        for line in done.stdout.splitlines()
        if not line.startswith(("@@", "---", "+++")) and line[1:].strip()
    ]
    assert re.findall(r"^```diff\n(.*?)^```", readme.TEXT, re.MULTILINE | re.DOTALL) == [
        "\n".join(lines) + "\n"
    ]
    assert sum(line.startswith("+") for line in lines) == 16


def test_readme_commands_are_all_run_by_tests():
    known = {*STARTED_HERE, "sbatch", "srun"}
    others = [line for line in COMMANDS if line.split()[0] not in known]
    assert others == ["bash examples/quickstart.sh", "bash tests/run.sh"]
    assert len(LOCAL) == 11


@pytest.mark.e2e
@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=() if one in BY_DEFAULT else pytest.mark.slow) for one in LOCAL],
)
def test_readme_command_works_as_printed(command, tmp_path, lacking):
    program = command.split()[0]
    if shutil.which(program, path=PATH) is None:
        lacking({"mpirun": "openmpi"}.get(program, "horovod"), f"no {program} here")
    (tmp_path / "examples").symlink_to(launches.TOP / "examples")
    done = launches.start(["bash", "-c", command], tmp_path, PATH=PATH, **AS_ROOT)
    assert done.returncode == 0, done.stderr
    if "mnist.py" in command:
        (run,) = (tmp_path / "runs").iterdir()
        assert json.loads((run / "summary.json").read_text())["metrics"]["top1"] > 0.5


@pytest.mark.slow
@pytest.mark.e2e
def test_mnist_plain_example_trains(tmp_path):
    command = [launches.PYTHON, launches.TOP / "examples" / "mnist_plain.py", "--epochs", "1"]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.5


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("options", [(), *(("--seed", str(seed)) for seed in range(5))])
def test_quickstart_reaches_98_percent_with_any_seed(options, tmp_path):
    if not (launches.TOP / ".venv").is_dir():
        pytest.fail("tests/run.sh makes the .venv that the quickstart uses")
    command = ["bash", launches.TOP / "examples" / "quickstart.sh", *options]
    done = launches.start([*command, "--run-dir", tmp_path / "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["top1"] >= 0.98
    table = dict(line.removeprefix("0: ").split(None, 1) for line in done.stdout.splitlines()[-9:])
    speed = ("top-1", "samples/s", "time", "effective")
    assert set(table) == {*speed, "ranks", "backend", "precision", "checkpoint", "run"}
    assert table["ranks"] == str(summary["world_size"])
    assert table["run"] == str(tmp_path / "run")
