"""What a start costs, as counts: files that are opened, memory of the ranks."""

import re
import shutil
import subprocess
from pathlib import Path

import launches
import pytest

RUN = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node"]
JOINS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == dist.get_world_size()
dist.destroy_process_group()
"""
MEMORY = """
import torch
with open("/proc/self/smaps_rollup") as file:
    print(next(line for line in file if line.startswith("Private_Dirty")).split()[-2])
"""


@pytest.fixture
def calls(lacking, tmp_path):
    """Return a function that returns the calls of a command that name a file, from strace."""
    if not shutil.which("strace"):
        lacking("strace", "apt-get install strace")

    def run(*command):
        log = tmp_path / "strace"
        trace = ["strace", "-f", "-qq", "-e", "trace=file", "-o", str(log)]
        env = {
            name: value
            for name, value in launches.environ().items()
            if name != "PYTHONDONTWRITEBYTECODE"
        }
        done = subprocess.run(
            [*trace, *command], env=env, capture_output=True, text=True, timeout=300, check=False
        )
        if "ptrace" in done.stderr:
            lacking("strace", done.stderr)
        assert done.returncode == 0, done.stderr
        return log.read_text(errors="replace").splitlines()

    return run


def opened(lines, name):
    """Return how many times a file was opened."""
    return sum(bool(re.search(rf'{name}", .*O_RDONLY.*= \d', line)) for line in lines)


def interpreters(lines):
    """Return the processes that have become a Python."""
    began = {line.split()[0] for line in lines if 'execve("' in line and "/python" in line}
    done = {line.split()[0] for line in lines if "execve" in line and line.endswith("= 0")}
    return began & done


def test_torch_is_loaded_once_for_all_ranks_and_the_store(calls):
    Path("train.py").write_text(JOINS)
    lines = calls(*RUN, "3", "train.py")
    assert opened(lines, "libtorch_python.so") == 1
    assert len(interpreters(lines)) == 2  # the launcher, and the process that imports torch


def test_one_rank_and_ranks_without_torch_start_no_more_than_they_need(calls):
    Path("train.py").write_text("import os; print(os.environ['RANK'])")
    for ranks in (1, 2):
        lines = calls(*RUN, str(ranks), "train.py")
        assert len(interpreters(lines)) == 2 + ranks  # the launcher, and the parent of the ranks


@pytest.mark.slow
def test_start_of_eight_ranks_makes_a_fifth_of_the_calls_of_torchrun(calls):
    Path("train.py").write_text(JOINS)
    torchrun = str(launches.BIN / "torchrun")
    base = len(calls(torchrun, "--nproc-per-node", "8", "train.py"))
    assert len(calls(*RUN, "8", "train.py")) <= 0.2 * base


def test_forked_ranks_share_the_memory_of_the_import():
    Path("train.py").write_text(MEMORY)
    sizes = []
    for more in ([], ["--fresh-interpreters"]):
        command = [*RUN[:-1], *more, RUN[-1], "3", "train.py"]
        done = subprocess.run(
            command, env=launches.environ(), capture_output=True, text=True, timeout=120, check=True
        )
        sizes.append(sum(int(line.split()[-1]) for line in done.stdout.splitlines()))
    assert sizes[0] <= 0.25 * sizes[1]
