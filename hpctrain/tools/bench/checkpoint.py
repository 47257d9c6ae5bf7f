"""Benchmark of a checkpoint: wait of the training and time until it is on disk, with torch.save.

Only rank 0 writes, as in a run. The other ranks wait, so that nothing else uses their hosts.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpctrain.checkpoint import Writer
from hpctrain.cluster.env_vars import RUN_DIR
from hpctrain.cluster.memory import available
from hpctrain.cluster.texts import first_line
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.rundir import RunDirectory
from hpctrain.tools.bench.measure import Results, compare, spell
from hpctrain.tools.bench.turns import in_turns
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = [
    "BASE",
    "OURS",
    "TENSORS",
    "Save",
    "Saves",
    "make_state",
    "measure",
    "refuse_size",
    "timed",
    "write",
]

# Begins to save, and returns a function that waits until all is on the disk.
Save = Callable[[], Callable[[], Any]]

BASE, OURS, WRITE = "torch.save, fsync", "hpctrain", "raw write, fsync"
_DEFAULT = 200 * 10**6  # about a checkpoint of ResNet-50 with momentum
TENSORS = 160  # about the number of weight tensors of ResNet-50
# The previous checkpoint stays until the new one is complete.
_ROOM = 2.2
# The state, its copy in the writer, and the bytes of the raw write.
_COPIES = 3
_LEAST = 10**4


def make_state(shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return a state of weights and momenta, each with `TENSORS` tensors of a shape."""
    names = [f"layer{number}.weight" for number in range(TENSORS)]
    weights, momenta = (
        {name: torch.full(shape, 0.1, device=device) for name in names} for _ in range(2)
    )
    return {"model": weights, "optimizer": {"momentum": momenta}}


class Saves:
    """Ways to save a state.

    Args:
        folder: separate folder on the file system to measure.
        size: bytes of the state: weights and momenta, each with half of them.
        device: device of the state.
    """

    def __init__(self, folder: Path, size: int, device: torch.device) -> None:
        self.folder = folder
        self.state = make_state((max(size // 4 // 2 // TENSORS, 1),), device)
        self._bytes = bytes([17]) * size
        self._writer = Writer(RunDirectory(folder / "run"), keep=1)
        self._step = 0

    def by_torch(self) -> Callable[[], Any]:
        """Save with torch.save, as the baseline; training waits for all of it."""
        write(self.folder / "state.pt", partial(torch.save, self.state))
        return lambda: None

    def ours(self) -> Callable[[], Any]:
        """Save in the background with hpctrain; training waits only for a copy."""
        self._step += 1
        self._writer.save(self._step, self.state, {})
        return self._writer.wait

    def raw(self) -> Callable[[], Any]:
        """Write the same number of bytes, to measure the file system alone."""
        write(self.folder / "raw", lambda file: file.write(self._bytes))
        return lambda: None

    def clear(self) -> None:
        """Remove all files but those of hpctrain, which keeps one checkpoint."""
        for path in self.folder.iterdir():
            if path.is_file():
                path.unlink()

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.close()


def write(path: Path, save: Callable[[BinaryIO], Any]) -> None:
    """Write a file until it is on the disk.

    Args:
        path: path of the file.
        save: function that writes to it.
    """
    with open(path, "wb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())


def timed(save: Save) -> tuple[float, float]:
    """Save once; return the seconds that training waits, and those until all is on the disk."""
    begin = time.perf_counter()
    wait = save()
    pause = time.perf_counter() - begin
    wait()
    return pause, time.perf_counter() - begin


def measure(session: Session, arguments: argparse.Namespace) -> Results:
    """Measure pauses and the times until all is on the disk; all ranks must call this together.

    Args:
        session: open session.
        arguments: arguments `run_dir`, `size` (bytes; None for a size that fits) and `seconds`.

    Raises:
        UsageError: disk space or memory does not suffice, or the directory is not writable.
    """
    opened: list[Saves] = []  # empty at all ranks but rank 0
    stalls: dict[str, list[float]] = {BASE: [], OURS: [], WRITE: []}

    @_usage_errors()
    def save(name: str) -> float:
        saves = opened[0]
        saves.clear()
        stall, seconds = timed({BASE: saves.by_torch, OURS: saves.ours, WRITE: saves.raw}[name])
        stalls[name].append(stall)
        return seconds

    with ExitStack() as undo:
        begin = partial(_open, arguments, session.device, undo, opened)
        path, size = on_rank_zero(session.backend, begin)
        arms = {
            name: partial(on_rank_zero, session.backend, partial(save, name)) for name in stalls
        }
        in_turns(session, arms, 0.0, 1)  # warm-up: memory is allocated, and directories are created
        times = in_turns(session, arms, arguments.seconds)
    if not session.is_main:
        return {}
    series = {name: {"stall_s": stalls[name][1:], "whole_s": own} for name, own in times.items()}
    results = compare(series, BASE)
    for arm in results.values():
        arm["gb_per_s"] = size / arm["whole_s"]["median"] / 1e9
    title = f"{spell(size)}, half weights and half momenta, in {path}"
    return {"path": path, "bytes": size, "title": title, "results": results}


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn an error of the file system into a UsageError.

    Raises:
        UsageError: the context raised such an error.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointError) as error:
        # torch.save raises a RuntimeError on a full disk.
        raise UsageError(
            "HT901",
            f"the checkpoint cannot be measured: {first_line(error)}",
            "a file system with room, which this user may write to",
            "--size 100MB",
            "--run-dir DIR on another file system",
        ) from None


@_usage_errors()
def _open(
    arguments: argparse.Namespace, device: torch.device, undo: ExitStack, opened: list[Saves]
) -> tuple[str, int]:
    """Append `Saves` in a new folder, which `undo` removes; return the run directory and size."""
    path = Path(arguments.run_dir or os.environ.get(RUN_DIR) or "runs").absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.is_dir())
    folder = Path(tempfile.mkdtemp(dir=nearest, prefix=".hpctrain-bench-"))
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    free, memory = shutil.disk_usage(folder).free, available()
    size = arguments.size or _fitting(free, memory)
    refuse_size(size, path, free, memory)
    opened.append(Saves(folder, size, device))
    undo.callback(opened[0].close)
    return str(path), size


def _fitting(free: int, memory: int | None) -> int:
    """Return the default size, or a smaller one that takes half of the room.

    Args:
        free: free bytes on the file system.
        memory: bytes of memory that this process may use; None where unknown.
    """
    room = [free / _ROOM, *([memory / _COPIES] if memory is not None else [])]
    return max(min(_DEFAULT, int(min(room) / 2)), _LEAST)


def refuse_size(size: int, path: Path, free: int, memory: int | None) -> None:
    """Raise an error if a size does not fit the free disk space and memory.

    Args:
        size: bytes of the state.
        path: directory that is measured.
        free: free bytes on its file system.
        memory: bytes of memory that this process may use; None where unknown.

    Raises:
        UsageError: the size does not fit, or is too small for the tensors of the state.
    """
    if size < _LEAST:
        raise UsageError("HT902", f"--size {size}B", f"{spell(_LEAST)} or more", "--size 100MB")
    for room, factor, where in (
        (free, _ROOM, f"on the file system of {path}"),
        (memory, _COPIES, "of memory"),
    ):
        if room is not None and room < size * factor:
            raise UsageError(
                "HT901",
                f"{spell(room)} are free {where}, but a state of {spell(size)} needs "
                f"{spell(size * factor)}",
                "room for the state and its copies",
                f"--size {spell(room / factor / 2).replace(' ', '')}",
                "" if where == "of memory" else "--run-dir DIR on another file system",
            )
