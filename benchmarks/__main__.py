"""Run all benchmarks in turn, each in its own process, and print one table at the end.

    python benchmarks [--only NAME …] [--quick | --check [DIR] | --gpu] [--save DIR]

A benchmark that cannot run on this machine is left out, and the reason is printed. `--quick` takes
the fewest rounds that give a spread: it checks that all benchmarks work, and its figures are of no
use. `--check` takes as few, and compares the figures that have a target with the results in DIR
(default: benchmarks/results) of the same kind of machine: it prints what got worse by more than the
noise. `--save DIR` writes the results of each benchmark to DIR/NAME.json, with machine, date,
versions and commit. `python benchmarks/pages` makes the figures of README.md from
benchmarks/results.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import changes, outcomes, place
from suite import BENCHMARKS

from hpctrain.tools.bench.measure import table

HERE = Path(__file__).resolve().parent


def run(name: str, options: list[str], folder: Path, kept_in: str) -> list[tuple[str, ...]]:
    """Run one benchmark, which prints its own output, and return its rows of the table.

    Args:
        name: key of BENCHMARKS.
        options: command line options of the benchmark.
        folder: folder for its record.
        kept_in: folder with a kept record to compare with; empty for none.
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
    record, kept = json.loads(path.read_text()), Path(kept_in, path.name)
    if kept_in and not kept.exists():
        return [(name, "", "", "", "no kept results")]
    rows = list(changes(json.loads(kept.read_text()), record) if kept_in else outcomes(record))
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
    size.add_argument(
        "--check",
        metavar="DIR",
        nargs="?",
        const=str(HERE / "results"),
        default="",
        help="few rounds, beside the results in DIR (default: benchmarks/results)",
    )
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
            options = benchmark.quick if arguments.quick or arguments.check else ""
            if arguments.gpu:
                if benchmark.gpu is None:
                    continue
                options = benchmark.gpu
            rows += run(name, shlex.split(options), folder, arguments.check)
    head = ("benchmark", "of what", "median [95 % interval]", "target", "outcome")
    if arguments.check:
        head = ("benchmark", "of what", "kept", "now", "change")
    print(table([head, *rows]))
    return any(row[-1].startswith("failed") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
