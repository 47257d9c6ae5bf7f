"""The files that `pip install .` installs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.e2e
def test_installed_package_has_every_file_and_runs(tmp_path):
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(TOP / name, tmp_path / name)
    shutil.copytree(
        TOP / "hpctrain", tmp_path / "hpctrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, "."]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "hpctrain")
    wanted = {path.relative_to(TOP) for path in (TOP / "hpctrain").rglob("*") if path.is_file()}
    kinds = (".py", ".gz", ".txt", ".typed", ".html", ".css")
    wanted = {path for path in wanted if path.suffix in kinds}
    assert wanted
    assert not {path for path in wanted if not (target / path).is_file()}
    for command in ([target / "bin" / "hpctrain"], [sys.executable, "-m", "hpctrain"]):
        done = subprocess.run(
            [*command, "hostlist", "n[1-2]"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(target)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == "n1\nn2\n", done.stderr
