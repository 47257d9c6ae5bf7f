"""The benchmark programs: how to run each one in short, and what it needs; no torch."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

__all__ = ["BENCHMARKS", "Benchmark"]


@functools.cache
def no_gpu() -> str:
    """Return why no GPU can be used, or an empty string."""
    script = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    return "torch finds no GPU" if found.returncode else ""


def no_slurm() -> str:
    """Return why the test cluster cannot be started, or an empty string."""
    if os.geteuid():
        return "the Slurm of tests/support/cluster.py is started by root"
    return "" if shutil.which("slurmctld") else "no Slurm: apt-get install slurm-wlm"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark program in this folder.

    Attributes:
        quick: options for a short run, used with --quick.
        unavailable: returns why the benchmark cannot run here, or an empty string.
        gpu: options for a run of a minute or two, used with --gpu; None if it needs no GPU.
    """

    quick: str
    unavailable: Callable[[], str] = lambda: ""
    gpu: str | None = None


# To add a benchmark, write a file that calls `harness.run`, and add a line here.
BENCHMARKS = {
    "startup": Benchmark("--rounds 2"),
    "hostlist": Benchmark("--rounds 6"),
    "first_allreduce": Benchmark("--rounds 2 --ranks 2"),
    "rendezvous": Benchmark("--rounds 2"),
    "submit": Benchmark("--rounds 2", no_slurm),
    "restart": Benchmark("--kills 2 --backends ddp", no_slurm),
    "many_nodes": Benchmark("--rounds 2"),
    "step_overhead": Benchmark("--rounds 4"),
    "allreduce": Benchmark("--rounds 4 --seconds 2"),
    "evaluation": Benchmark("--rounds 4"),
    "replica_check": Benchmark("--rounds 2 --steps 4"),
    "input": Benchmark("--rounds 2 --images 24"),
    "checkpoint": Benchmark("--rounds 2 --megabytes 100"),
    "checkpoint_ranks": Benchmark("--rounds 2 --megabytes 20"),
    "fsdp": Benchmark("--rounds 2 --steps 2"),
    "precision": Benchmark("--seconds 2", no_gpu, "--seconds 6"),
    "imagenet": Benchmark("--rounds 2 --steps 2", no_gpu, "--rounds 8 --steps 10"),
    "gpt": Benchmark("--rounds 2 --steps 1", no_gpu, ""),
}
