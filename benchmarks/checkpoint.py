"""Cost of a checkpoint: how long a save stops the training, and how much its write slows work.

    python benchmarks/checkpoint.py [--rounds 8] [--megabytes 100 1000] [--folder DIR] [--save FILE]

A state of the given size, half weights and half momenta, is saved by hpctrain, by `torch.save`, and
by torch's distributed checkpoint, synchronously and asynchronously (one process with a gloo group,
staging memory reused). A save ends only when the data is on the disk (fsync), so no arm leaves the
disk something to write for the next one. The arms take turns. The stall is the duration of the
call; it is compared with the stall of `torch.save` in the same round. The first save of each arm is
reported separately, because it allocates memory. The tax is the slowdown of a loop of matrix
products while a save is written, relative to as many products just after it. It is measured on one
core and on all cores, in half as many rounds.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import add_save, describe, facts, order, outcome, save, summary, table
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hpctrain.checkpoint import Writer
from hpctrain.rundir import RunDirectory

TARGET = 0.1
TENSORS = 160  # as many as ResNet-50 has weights
BASE, OURS = "torch.save, fsync", "hpctrain"
State = dict[str, Any]
Wait = Callable[[], None]


class Arms:
    """The ways to save a state; each returns a function that waits until it is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.writer = Writer(RunDirectory(folder / "run"), keep=1)
        # Staging memory is reused, as in hpctrain; the other options need a GPU or more processes.
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.all: dict[str, Callable[[State], Wait]] = {
            BASE: self.torch_save,
            OURS: self.ours,
            "distributed checkpoint": self.distributed_checkpoint,
            "the same, async_save": self.distributed_checkpoint_async,
        }

    def torch_save(self, state: State) -> Wait:
        """Save with `torch.save` and fsync."""
        with open(self.folder / "state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def ours(self, state: State) -> Wait:
        """Save with hpctrain, in the background."""
        self.step += 1
        self.writer.save(self.step, state, {})
        return self.writer.wait

    def distributed_checkpoint(self, state: State) -> Wait:
        """Save with torch's distributed checkpoint, which syncs its files by default."""
        dcp.save(state, checkpoint_id=self.folder / "dcp")
        return lambda: None

    def distributed_checkpoint_async(self, state: State) -> Wait:
        """Save with torch's distributed checkpoint in the background; staging memory is reused."""
        place = self.folder / "async"
        future = dcp.async_save(state, checkpoint_id=place, async_stager=self.stager)
        return lambda: future.result() and None

    def clear(self) -> None:
        """Remove the files of all arms except hpctrain's."""
        for name in ("dcp", "async"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "state.pt").unlink(missing_ok=True)


def new_state(megabytes: int) -> State:
    """Return fp32 weights and momenta, together of this many megabytes."""
    size = megabytes * 1_000_000 // 4 // 2 // TENSORS
    weights = {f"layer{n}.weight": torch.randn(size) for n in range(TENSORS)}
    momenta = {n: {"momentum_buffer": torch.randn(size)} for n in range(TENSORS)}
    group = {"lr": 0.1, "momentum": 0.9, "params": list(range(TENSORS))}
    return {"model": weights, "optimizer": {"state": momenta, "param_groups": [group]}}


def resident(field: str) -> int:
    """Return the memory of this process in bytes: `VmRSS` is now, `VmHWM` is its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(field)


def timed(arm: Callable[[State], Wait], state: State) -> dict[str, float]:
    """Save once; return the seconds of the call and of the whole save, and the extra memory."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin = time.perf_counter()
    wait = arm(state)
    stall = time.perf_counter() - begin
    wait()
    whole = time.perf_counter() - begin
    return {"stall": stall, "whole": whole, "memory": resident("VmHWM") - before}


def tax(arm: Callable[[State], Wait], state: State, threads: int) -> float:
    """Return the time of a product during a save, relative to one just after it."""
    torch.set_num_threads(threads)
    left, right = torch.randn(400, 400), torch.randn(400, 400)
    out = torch.empty(400, 400)
    wait = arm(state)
    done = _Done(wait)
    count, begin = 0, time.perf_counter()
    while not done.is_set():
        torch.mm(left, right, out=out)
        count += 1
    during = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(count):
        torch.mm(left, right, out=out)
    after = time.perf_counter() - begin
    return during / after


class _Done:
    """A wait in a separate thread; `is_set` returns whether it has ended."""

    def __init__(self, wait: Wait) -> None:
        self._event = threading.Event()

        def run() -> None:
            wait()
            self._event.set()

        threading.Thread(target=run).start()
        self.is_set = self._event.is_set


def take_turns(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Run all rounds of one size in this process, and return the measured values."""
    state = new_state(megabytes)
    arms = Arms(folder)
    cores = len(os.sched_getaffinity(0))
    first, later = {}, {name: [] for name in arms.all}
    taxes = {(name, n): [] for name in arms.all for n in {1, cores} if name != BASE}
    for number in range(rounds + 1):
        for name in order(list(arms.all), number):
            arms.clear()
            result = timed(arms.all[name], state)
            if number:
                later[name].append(result)
            else:
                first[name] = result
    background = [OURS, "the same, async_save"]
    for number in range(max(rounds // 2, 2)):
        for name in order(background, number):
            for threads in (1, cores):
                arms.clear()
                taxes[name, threads].append(tax(arms.all[name], state, threads))
    arms.writer.close()
    named = {f"{name}, {n} of {cores} cores": t for (name, n), t in taxes.items() if t}
    return {"first": first, "later": later, "tax": named}


def start(megabytes: int, rounds: int, folder: str | None) -> dict[str, Any]:
    """Measure one size in a new process, so that no memory of another size remains."""
    with tempfile.TemporaryDirectory(dir=folder) as path:
        result = Path(path) / "result.json"
        command = [sys.executable, __file__, "--rounds", str(rounds), "--folder", path]
        command += ["--megabytes", str(megabytes), "--result", str(result)]
        subprocess.run(command, check=True)
        return json.loads(result.read_text())


def child(megabytes: int, rounds: int, folder: Path, result: Path) -> None:
    """Measure one size and write the measured values."""
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with contextlib.redirect_stdout(sys.stderr):
        found = take_turns(megabytes, rounds, folder)
    distributed.destroy_process_group()
    result.write_text(json.dumps(found))


def evaluate(found: dict[str, Any]) -> dict[str, Any]:
    """Return medians, and the ratio of each stall to that of torch.save in the same round."""
    base = [save["stall"] for save in found["later"][BASE]]
    results: dict[str, Any] = {"arms": {}, "tax": {}}
    for name, later in found["later"].items():
        stalls = [save["stall"] for save in later]
        ratio = summary([a / b for a, b in zip(stalls, base, strict=True)])
        results["arms"][name] = {
            "stall_s": summary(stalls),
            "ratio": ratio,
            "whole_s": summary([save["whole"] for save in later]),
            "memory_mb": summary([save["memory"] / 1e6 for save in later]),
            "first": found["first"][name],
        }
    results["tax"] = {name: summary(values) for name, values in found["tax"].items()}
    ratio = results["arms"][OURS]["ratio"]
    results["target"] = {"limit": TARGET, "outcome": outcome(ratio, TARGET)}
    return results


def show(megabytes: int, results: dict[str, Any]) -> str:
    """Return the results of one size as text tables."""
    head = ("stall, s", "× torch.save", "until on the disk, s", "first stall, s", "MB more, first")
    rows = [(f"{megabytes} MB", *head, "MB more")]
    for name, result in results["arms"].items():
        first = result["first"]
        rows.append(
            (
                name,
                describe(result["stall_s"], ".3f"),
                describe(result["ratio"], ".3f") if name != BASE else "",
                describe(result["whole_s"], ".2f"),
                f"{first['stall']:.3f}",
                f"{first['memory'] / 1e6:.0f}",
                describe(result["memory_mb"], ".0f"),
            )
        )
    taxes = [("products while a save is written", "× the time of one")]
    taxes += [(name, describe(values, ".3f")) for name, values in results["tax"].items()]
    target = f"hpctrain: at most × {TARGET:g}: {results['target']['outcome']}"
    return "\n".join([table(rows), target, "", table(taxes), ""])


def main() -> None:
    """Measure every size, print, save."""
    parser = argparse.ArgumentParser(description="The cost of a save: its stall and its tax.")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[100, 1000], help="default: 100 1000"
    )
    parser.add_argument("--folder", metavar="DIR", help="folder on the disk to measure (/tmp)")
    add_save(parser)
    parser.add_argument("--result", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result:
        folder = Path(arguments.folder)
        child(arguments.megabytes[0], arguments.rounds, folder, arguments.result)
        return
    record = facts(["hpctrain", "torch"])
    record["sizes"] = {}
    for megabytes in arguments.megabytes:
        results = evaluate(start(megabytes, arguments.rounds, arguments.folder))
        record["sizes"][str(megabytes)] = results
        print(show(megabytes, results))
    save(arguments.save, record)


if __name__ == "__main__":
    main()
