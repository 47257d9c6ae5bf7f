"""What a login host runs, on Python's own library alone: no torch, no other package."""

import subprocess
import sys

import launches
import pytest

from hpctrain.cli import main

BARE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1));"
    "from hpctrain.__main__ import main; code = main();"
    "assert not {'torch', 'numpy', 'submitit', 'cloudpickle'} & set(sys.modules); sys.exit(code)"
)
JOB = 'command = "python train.py"\nnodes = 2\ntime = "1h"\n'


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("render", "job.toml"), 0, "#SBATCH --nodes=2\n"),
        (("lint", "job.sh"), 0, ""),
        (("submit", "job.toml", "--dry-run"), 0, "#SBATCH --nodes=2\n"),
        (("submit", "--save", "new.toml", "--dry-run", "--", "python", "train.py"), 0, "train.py"),
        (("status",), 0, ""),
        (("cancel", "no-such-run"), 1, "squeue"),
        (("requeue", "no-such-run"), 1, "squeue"),
        (("site",), 1, "Slurm"),
        (("submit", "job.toml"), 1, "sbatch"),
        (("submit", "job.toml", "--via", "submitit"), 2, "pip install 'hpctrain[submit]'"),
    ],
)
def test_a_command(tmp_path, arguments, code, told):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.sh").write_text((launches.TOP / "sbatch" / "mnist.sh").read_text())
    # -I leaves out PYTHONPATH and the user's packages, -S those of the environment.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE, launches.TOP, *arguments],
        env={"PATH": "/nowhere", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--nods", "2"), "do you mean --nodes?"),
        (("--mem", "4G"), "--mem is an option of sbatch's\n  to mend:  --memory in its place"),
        (("-N", "2"), "--nodes in its place"),
        (("--ntasks=4",), "--nodes and --tasks-per-node in its place"),
    ],
)
def test_an_option_that_is_none_comes_with_the_one_that_is_meant(words, hint, capsys):
    try:
        code = main(["submit", *words, "--dry-run", "--", "true"])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert hint in capsys.readouterr().err
