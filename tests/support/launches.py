"""Starts of examples/mnist.py as a person types them, and the rows of their run directories."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
EXAMPLE = TOP / "examples" / "mnist.py"
CHAOS = TOP / "sbatch" / "acceptance" / "chaos.py"
TWICE = Path(__file__).with_name("fp64_and_fp32.py")
PYTHON = sys.executable
BIN = Path(PYTHON).parent
PARITY = ("--data", "digits", "--global-batch", "48", "--batch-size", "16")

LOCAL = {
    "python": [PYTHON],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "3", "--"],
    "hpctrain run": [
        *(str(BIN / "hpctrain"), "run", "--nodes", "2", "--nproc-per-node", "2,1", "--as", "slurm")
    ],
}


def checkout(folder):
    """Make a folder look like the top of the repository, for scripts that write into it."""
    for name in ("sbatch", "examples"):
        (folder / name).symlink_to(TOP / name)
    return folder


def example(name):
    """Return examples/NAME.py as a module."""
    return load(EXAMPLE.with_name(f"{name}.py"))


def load(path):
    """Return a Python file that is in no package as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def on_cluster(cluster, **more):
    """Return the variables with which a command of this Python runs on the Slurm of the tests."""
    env = {**cluster.environ(), **more}
    return {**env, "PATH": f"{BIN}:{env['PATH']}"}


def environ(**more):
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**env, "OMP_NUM_THREADS": "1", **more}


def start(command, cwd, timeout=180, **more):
    """Run a command to its end; kill it and its child processes after the time-out."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environ(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"{command} did not end within {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def rows(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in rows(run) if "loss" in row]


def same_losses(folder, reference):
    """Check that the two runs of fp64_and_fp32.py have the losses of one process."""
    fp64, fp32 = losses(folder / "fp64"), losses(folder / "fp32")
    assert len(fp64) == 50
    assert len(fp32) == 10
    assert fp64 == pytest.approx(losses(reference / "fp64"), rel=1e-9)
    assert fp32 == pytest.approx(losses(reference / "fp32"), rel=1e-3)
