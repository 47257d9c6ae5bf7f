"""Run all benchmarks in turn, each in its own process, and print one table at the end.

    python benchmarks [--only NAME …] [--quick | --gpu] [--save DIR]

A benchmark that cannot run on this machine is left out, and the reason is printed. `--quick` takes
the fewest rounds that give a spread: it checks that all benchmarks work, and its figures are of no
use. `--save DIR` writes the results of each benchmark to DIR/NAME.json, with machine, date,
versions and commit. `python benchmarks/pages` makes the figures of README.md from
benchmarks/results.
"""

import argparse
import dataclasses
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import place
from outcomes import outcomes

from hpctrain.tools.bench.measure import table

HERE = Path(__file__).resolve().parent


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


def nothing() -> str:
    """Return an empty string: nothing is missing."""
    return ""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark program in this folder.

    Attributes:
        quick: options for a short run, used with --quick.
        unavailable: returns why the benchmark cannot run here, or an empty string.
        gpu: options for a run of a minute or two, used with --gpu; None if it needs no GPU.
    """

    quick: str
    unavailable: Callable[[], str] = nothing
    gpu: str | None = None


# To add a benchmark, write a file that calls `harness.run`, and add a line here.
BENCHMARKS = {
    "startup": Benchmark("--rounds 2"),
    "hostlist": Benchmark("--rounds 6"),
    "first_allreduce": Benchmark("--rounds 2"),
    "rendezvous": Benchmark("--rounds 2"),
    "submit": Benchmark("--rounds 2", no_slurm),
    "step_overhead": Benchmark("--rounds 4"),
    "allreduce": Benchmark("--rounds 4 --seconds 2"),
    "evaluation": Benchmark("--rounds 4"),
    "replica_check": Benchmark("--rounds 2 --steps 4"),
    "input": Benchmark("--rounds 2 --images 24"),
    "checkpoint": Benchmark("--rounds 2 --megabytes 100"),
    "checkpoint_ranks": Benchmark("--rounds 2 --megabytes 20"),
    "fsdp": Benchmark("--rounds 2 --steps 2"),
    "memory_checkpoint": Benchmark("--rounds 2 --megabytes 20"),
    "precision": Benchmark("--seconds 2", no_gpu, "--seconds 6"),
    "imagenet": Benchmark("--rounds 2 --steps 2", no_gpu, "--rounds 8 --steps 10"),
    "gpt": Benchmark("--rounds 2 --steps 1", no_gpu, ""),
}


def run(name: str, options: list[str], folder: Path) -> list[tuple[str, ...]]:
    """Run one benchmark, which prints its own output, and return its rows of the table.

    Args:
        name: key of BENCHMARKS.
        options: command line options of the benchmark.
        folder: folder for its record.
    """
    if reason := BENCHMARKS[name].unavailable():
        print(f"== {name}: left out: {reason}\n", flush=True)
        return [(name, "", "", "", f"left out: {reason}")]
    path = folder / f"{name}.json"
    command = [sys.executable, str(HERE / f"{name}.py"), *options, "--save", str(path)]
    print(f"== {shlex.join(['python', f'benchmarks/{name}.py', *options])}", flush=True)
    begun = time.monotonic()
    done = subprocess.run(command, check=False)
    print(f"== {time.monotonic() - begun:.0f} s\n", flush=True)
    if done.returncode or not path.exists():
        return [(name, "", "", "", f"failed, exit code {done.returncode}")]
    rows = list(outcomes(json.loads(path.read_text())))
    return [(name, *row) for row in rows] or [(name, "", "", "", "no target")]


def main() -> int:
    """Run the chosen benchmarks; return 1 if any of them failed."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks", description="Run all benchmarks in turn."
    )
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS)
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few rounds, no usable figures")
    size.add_argument("--gpu", action="store_true", help="only benchmarks for GPUs, some minutes")
    parser.add_argument(
        "--save", metavar="DIR", type=place, help="write each record to DIR/NAME.json"
    )
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.save or temporary)
        for name in arguments.only or BENCHMARKS:
            benchmark = BENCHMARKS[name]
            options = benchmark.quick if arguments.quick else ""
            if arguments.gpu:
                if benchmark.gpu is None:
                    continue
                options = benchmark.gpu
            rows += run(name, shlex.split(options), folder)
    head = ("benchmark", "of what", "median [95 % interval]", "target", "outcome")
    print(table([head, *rows]))
    return any(row[-1].startswith("failed") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
