"""Benchmark of a checkpoint that several ranks write together, with torch.save at rank 0.

Four ranks have the same weights and momenta. A training waits until the last rank has copied what
it writes; the whole save ends when rank 0 has committed. The base is torch.save and fsync at rank
0, for which all ranks wait. "raw write" is the file system alone: each rank writes its quarter.
async_save of torch.distributed.checkpoint divides the writing among the ranks too, and its staging
memory is reused; here the weights are equal on all ranks, of which it writes each one once.
torch.distributed.checkpoint divides the writing among the ranks by itself; async_save does not
call fsync.
The reads are those of a resume, in which all hashes are checked: by ranks that need all weights, or
a quarter of each. The files are in the page cache then.
"""

import argparse
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint import OPTIONS, TENSORS, make_state, stager, write
from harness import Results, compare, restart, run
from torch import distributed
from torch.distributed import checkpoint as dcp

import hpctrain
from hpctrain.backends.extent import Extent
from hpctrain.checkpoint import Team, Writer, open_checkpoint, process_name
from hpctrain.rundir import RunDirectory
from hpctrain.tools.bench.measure import take_turns

RANKS = 4
BASE, RAW, ASYNC = "torch.save, fsync", "raw write, fsync", "distributed checkpoint, async_save"
ALL, QUARTER = "all weights", "a quarter of each"
WRITERS = {f"hpctrain, {count} of 4 ranks write": count for count in (1, 2, 4)}
TARGETS = {name: {"ratio": "≤ 0.1"} for name in list(WRITERS)[-1:]}


class Saves:
    """Ways to save a state that all ranks have.

    Args:
        session: the session.
        folder: folder on the file system to measure, the same on all ranks.
        size: bytes of the state.
    """

    def __init__(self, session: hpctrain.Session, folder: Path, size: int) -> None:
        self._backend, self._folder = session.backend, folder
        shape = (RANKS, max(size // 4 // 2 // TENSORS // RANKS, 1))
        self._state = make_state(shape)
        tensors = [*self._state["model"].values(), *self._state["optimizer"]["momentum"].values()]
        everyone = range(RANKS)
        self._extents = {id(tensor): Extent.whole(shape, everyone) for tensor in tensors}
        self._bytes = bytes([17]) * (size // RANKS)
        self._stager = stager()
        # The thread of async_save has a group of its own: barriers come in between in any order.
        self._group = distributed.new_group(backend="gloo")
        self._writers: dict[str, Writer] = {}
        self._step = 0
        for name, count in WRITERS.items():
            directory = RunDirectory(folder / name)
            who, nonce = self._backend.broadcast_object((process_name(), name))
            team = Team(self._backend.rank, range(count), False, who, nonce)
            self._writers[name] = Writer(directory, keep=1, team=team)

    def stall(self, name: str) -> dict[str, float]:
        """Save once; return the seconds that the training waits, and those of the whole save."""
        self._backend.barrier()
        begin = time.perf_counter()
        if name in WRITERS:
            writer = self._writers[name]
            self._step += 1
            writer.start(writer.prepare(self._step, self._state, {}, self._extents))
            self._backend.barrier()
            waited = time.perf_counter() - begin
            if self._backend.rank == 0:
                writer.wait()
        elif name == ASYNC:
            place = self._folder / "async"
            saved = dcp.async_save(
                self._state,
                checkpoint_id=place,
                async_stager=self._stager,
                process_group=self._group,
            )
            self._backend.barrier()
            waited = time.perf_counter() - begin
            saved.result()
        else:
            if name == RAW:
                path = self._folder / f"raw-{self._backend.rank}"
                write(path, lambda file: file.write(self._bytes))
            elif self._backend.rank == 0:
                write(self._folder / "state.pt", partial(torch.save, self._state))
            self._backend.barrier()
            waited = time.perf_counter() - begin
        self._backend.barrier()
        return {"stall_s": waited, "whole_s": time.perf_counter() - begin}

    def read(self, name: str) -> dict[str, float]:
        """Read what four ranks have written; return the seconds until all ranks have done so."""
        directory = RunDirectory(self._folder / list(WRITERS)[-1])
        (step,) = directory.steps()
        self._backend.barrier()
        begin = time.perf_counter()
        opened = open_checkpoint(directory.checkpoint(step), step)
        if name == QUARTER:
            for part in (opened.state["model"], opened.state["optimizer"]["momentum"]):
                for stored in part.values():
                    row = stored.shape[1]
                    first = self._backend.rank * row
                    stored.divide(first, first + row, lambda values: values)
        opened.read()
        self._backend.barrier()
        return {"s": time.perf_counter() - begin}

    def close(self) -> None:
        """End the threads."""
        for writer in self._writers.values():
            writer.close()


def rank(arguments: argparse.Namespace) -> Any:
    """Measure one size; return the times of each arm, by round."""
    torch.set_num_threads(1)
    with hpctrain.Session(backend="ddp", batch_size=1) as session:
        folder = Path(session.backend.broadcast_object(tempfile.mkdtemp(dir=arguments.folder)))
        saves = Saves(session, folder, arguments.megabytes[0] * 10**6)
        arms = {name: partial(saves.stall, name) for name in (BASE, *WRITERS, ASYNC, RAW)}
        # The warm-up allocates memory.
        times = take_turns(arms, arguments.rounds, warm_up=1)
        reads = {name: partial(saves.read, name) for name in (ALL, QUARTER)}
        read = take_turns(reads, arguments.rounds)
        saves.close()
        session.backend.barrier()
        if session.is_main:
            shutil.rmtree(folder)
        return [times, read] if session.is_main else None


def measure(arguments: argparse.Namespace) -> Results:
    """Return the results of each size."""
    results: Results = {}
    for size in arguments.megabytes:
        times, read = restart(arguments, RANKS, megabytes=size)
        results[f"{size} MB"] = compare(times, BASE, targets=TARGETS)
        results[f"{size} MB, read by 4 ranks"] = compare(read, ALL)
    return results


if __name__ == "__main__":
    packages = ["hpctrain", "torch"]
    run("The cost of a save by several ranks.", 6, packages, measure, OPTIONS, rank)
