"""Cost of a checkpoint: how long a save stops the training, and how much its write slows work.

    python benchmarks/checkpoint.py [--rounds 8] [--megabytes 100 1000] [--folder DIR] [--save FILE]

hpctrain and `torch.save` save a state, half weights and half momenta, and so does torch's
distributed checkpoint, synchronously and asynchronously (one process with a gloo group, staging
memory reused). A save ends only when the data is on the disk (fsync), so no arm leaves the
disk something to write for the next one. The arms take turns. The stall is the duration of the
call; it is compared with the stall of `torch.save` in the same round. The first save of each arm is
reported separately, because it allocates memory. Other work meanwhile is the slowdown of a loop of
matrix products while a save is written, relative to as many products just after it. It is measured
on one core and on all cores, in half as many rounds.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from harness import Results, compare, restart, run
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hpctrain.checkpoint import Writer
from hpctrain.rundir import RunDirectory
from hpctrain.tools.bench.measure import summary, take_turns

# Starts to save, and returns a function that waits until all is on the disk.
Save = Callable[[], Callable[[], Any]]

BASE, OURS = "torch.save, fsync", "hpctrain"
DCP, ASYNC = "distributed checkpoint", "the same, async_save"
TARGETS = {OURS: {"ratio": "≤ 0.1"}}
TENSORS = 160  # about the number of weight tensors of ResNet-50


def make_state(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a state of weights and momenta, each with `TENSORS` tensors of a shape."""
    names = [f"layer{number}.weight" for number in range(TENSORS)]
    weights, momenta = ({name: torch.full(shape, 0.1) for name in names} for _ in range(2))
    return {"model": weights, "optimizer": {"momentum": momenta}}


def write(path: Path, save: Callable[[BinaryIO], Any]) -> None:
    """Write a file by a function until it is on the disk."""
    with open(path, "wb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())


def stager() -> DefaultStager:
    """Return torch's stager, which reuses its memory, as hpctrain does."""
    # All options off: they need a GPU or more processes.
    return DefaultStager(StagingOptions(False, False, False, False))


class Saves:
    """Ways to save a state: weights and momenta, each with half of the bytes.

    Args:
        folder: separate folder on the file system to measure.
        size: bytes of the state.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.state = make_state((max(size // 4 // 2 // TENSORS, 1),))
        self._writer = Writer(RunDirectory(folder / "run"), keep=1)
        self._step = 0
        self._stager = stager()

    def by_torch(self) -> Callable[[], Any]:
        """Save with torch.save, as the baseline; training waits for all of it."""
        write(self.folder / "state.pt", partial(torch.save, self.state))
        return lambda: None

    def ours(self) -> Callable[[], Any]:
        """Save in the background with hpctrain; training waits only for a copy."""
        self._step += 1
        self._writer.save(self._step, self.state, {})
        return self._writer.wait

    def by_dcp(self) -> Any:
        """Save with torch's distributed checkpoint, which syncs its files by default."""
        dcp.save(self.state, checkpoint_id=self.folder / "dcp")
        return lambda: None

    def by_async_dcp(self) -> Any:
        """Save with torch's distributed checkpoint in the background; staging memory is reused."""
        place = self.folder / "async"
        return dcp.async_save(self.state, checkpoint_id=place, async_stager=self._stager).result

    def clear(self) -> None:
        """Remove all files but those of hpctrain, which keeps one checkpoint."""
        (self.folder / "state.pt").unlink(missing_ok=True)
        for name in ("dcp", "async"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.close()


def resident(field: str) -> int:
    """Return the memory of this process in bytes: `VmRSS` is now, `VmHWM` is its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(field)


def stall(saves: Saves, save: Save) -> dict[str, float]:
    """Save once; return the seconds of the call and of the whole save, and the extra memory."""
    saves.clear()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin = time.perf_counter()
    wait = save()
    pause = time.perf_counter() - begin
    wait()
    whole = time.perf_counter() - begin
    memory = resident("VmHWM") - before
    return {"stall_s": pause, "whole_s": whole, "memory_mb": memory / 1e6}


def slowdown(saves: Saves, save: Save, threads: int) -> float:
    """Return the time of a product during a save, relative to one just after it."""
    saves.clear()
    torch.set_num_threads(threads)
    left, right, out = (torch.randn(400, 400) for _ in range(3))
    waiting = threading.Thread(target=save())
    waiting.start()
    count, begin = 0, time.perf_counter()
    while waiting.is_alive():
        torch.mm(left, right, out=out)
        count += 1
    during = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(count):
        torch.mm(left, right, out=out)
    return during / (time.perf_counter() - begin)


def rank(arguments: argparse.Namespace) -> Results:
    """Measure one size in this process, so that no memory of another size remains."""
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        saves = Saves(Path(folder), arguments.megabytes[0] * 10**6)
        ways: dict[str, Save] = {
            BASE: saves.by_torch,
            OURS: saves.ours,
            DCP: saves.by_dcp,
            ASYNC: saves.by_async_dcp,
        }
        arms = {name: partial(stall, saves, save) for name, save in ways.items()}
        first = take_turns(arms, 1)
        later = take_turns(arms, arguments.rounds)
        at_work = {
            f"{name}, {threads} of {cores} cores": partial(slowdown, saves, ways[name], threads)
            for name in (OURS, ASYNC)
            for threads in sorted({1, cores})
        }
        slowdowns = take_turns(at_work, max(arguments.rounds // 2, 2))
        saves.close()
    distributed.destroy_process_group()
    results = compare(later, BASE, targets=TARGETS)
    for name, [one] in first.items():
        results[name] |= {"first_s": one["stall_s"], "first_bytes": one["memory_mb"] * 1e6}
    meanwhile = {name: {"slowdown": summary(values)} for name, values in slowdowns.items()}
    return {**results, "other work meanwhile": meanwhile}


def measure(arguments: argparse.Namespace) -> Results:
    """Return the results of each size."""
    return {f"{size} MB": restart(arguments, megabytes=size) for size in arguments.megabytes}


OPTIONS: dict[str, dict[str, Any]] = {
    "--megabytes": {"type": int, "nargs": "+", "default": [100, 1000], "help": "100 1000"},
    "--folder": {"metavar": "DIR", "help": "folder on the disk to measure (/tmp)"},
}

if __name__ == "__main__":
    packages = ["hpctrain", "torch"]
    run("The cost of a save, and of its write.", 8, packages, measure, OPTIONS, rank)
