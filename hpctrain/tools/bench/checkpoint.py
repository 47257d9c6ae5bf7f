"""Benchmark of a checkpoint: wait of the training and time until it is on disk, with torch.save.

Only rank 0 writes, as in a run. The other ranks wait, so that nothing else uses their hosts.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hpctrain.checkpoint import Writer
from hpctrain.checkpoint.available_memory import available
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.rundir import RunDirectory
from hpctrain.tools.bench.measure import compare, describe, spell, table
from hpctrain.tools.bench.turns import in_turns, timed
from hpctrain.tools.doctor import storage
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = ["evaluate", "measure", "refuse_size", "show", "write"]

T = TypeVar("T")

BASE, OURS, WRITE, COPY = "torch.save, fsync", "hpctrain", "raw write, fsync", "memory copy"
_TENSORS = 160  # about the number of weight tensors of ResNet-50
_LARGEST, _TRIAL, _SECONDS_OF_A_WRITE = 10**9, 64 * 10**6, 2.0
# The previous checkpoint stays until the new one is complete.
_ROOM = 2.2
# The state, its copy in the writer, the bytes of the raw write, and their copy.
_COPIES = 4
_PIECE = 1 << 22
_LEAST = 10**4
# Largest slowdown of an arm against the trial: other jobs use the disk, caches fill up.
_SLOWER = 3


class _SavingArms:
    """Arms that save a state; each returns the seconds until it is on the disk.

    Args:
        folder: separate folder on the file system to measure.
        size: bytes of the state.
        device: device of the state.

    Attributes:
        all: arms by name.
        pauses: seconds that training waited for hpctrain, one value per call.
    """

    def __init__(self, folder: Path, size: int, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._state = _new_state(size, device)
        self._bytes = torch.full((size,), 17, dtype=torch.uint8)
        self._copy = torch.empty_like(self._bytes)
        self._writer = Writer(RunDirectory(folder / "run"), keep=1)
        self._step = 0
        self.all: dict[str, Callable[[], float]] = {
            BASE: self.by_torch,
            OURS: self.ours,
            WRITE: self.raw,
            COPY: self.copy,
        }
        self.pauses: list[float] = []

    def by_torch(self) -> float:
        """Save with torch.save, as the baseline; training waits for all of it."""
        path = self._folder / "state.pt"
        begin = time.perf_counter()
        with open(path, "wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
        path.unlink()
        return seconds

    def ours(self) -> float:
        """Save in the background with hpctrain; training waits only for a copy."""
        self._step += 1
        begin = time.perf_counter()
        self._writer.save(self._step, self._state, {})
        pause = time.perf_counter() - begin
        self._writer.wait()
        seconds = time.perf_counter() - begin
        self.pauses.append(pause)
        return seconds

    def raw(self) -> float:
        """Write the same number of bytes, to measure the file system alone."""
        return write(self._folder / "raw", self._bytes)

    def copy(self) -> float:
        """Copy the same number of bytes, to measure the memory of the host."""
        return timed(torch.device("cpu"), lambda: self._copy.copy_(self._bytes))

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.close()


def _new_state(size: int, device: torch.device) -> dict[str, Any]:
    """Return a state of weights and momenta, each with half of the bytes."""
    count = max(size // 4 // 2 // _TENSORS, 1)
    tensors = [torch.full((count,), 0.1, device=device) for _ in range(2 * _TENSORS)]
    weights = {f"layer{n}.weight": tensor for n, tensor in enumerate(tensors[:_TENSORS])}
    momenta = {n: {"momentum_buffer": tensor} for n, tensor in enumerate(tensors[_TENSORS:])}
    return {"model": weights, "optimizer": {"state": momenta, "param_groups": []}}


def write(path: Path, content: torch.Tensor) -> float:
    """Write bytes to a file and remove it; return the seconds until they were on the disk.

    Args:
        path: path of the file.
        content: uint8 tensor on the host.
    """
    view = memoryview(content.numpy())  # type: ignore[arg-type]
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            while piece:
                piece = piece[file.write(piece) or 0 :]
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def measure(session: Session, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure pauses and the times until all is on the disk; all ranks must call this together.

    Args:
        session: open session.
        arguments: arguments `run`, `size` (bytes; None for a size that fits) and `seconds`.

    Raises:
        UsageError: disk space, memory or time does not suffice, or the directory is not writable.
    """
    opened: list[_SavingArms] = []  # empty at all ranks but rank 0

    def open_arms() -> tuple[str, int]:
        path, folder = _make_folder(arguments.run_dir, undo)
        size = arguments.size or _fitting(folder)
        refuse_size(size, path, shutil.disk_usage(folder).free, available())
        if arguments.size and session.world.world_size > 1:
            refuse_slow(size, _speed(folder, min(size, _TRIAL)), session.options.timeout)
        opened.append(_SavingArms(folder, size, session.device))
        undo.callback(opened[0].close)
        return str(path), size

    def turn(name: str) -> float:
        seconds: float = on_rank_zero(session.backend, lambda: _as_usage_error(opened[0].all[name]))
        return seconds

    with ExitStack() as undo:
        path, size = on_rank_zero(session.backend, lambda: _as_usage_error(open_arms))
        arms = {name: partial(turn, name) for name in (BASE, OURS, WRITE, COPY)}
        in_turns(session, arms, 0.0, 1)  # warm-up: memory is allocated, and directories are created
        times = in_turns(session, arms, arguments.seconds)
        if not session.is_main:
            return {}
        return {"path": path, "bytes": size, **evaluate(size, times, opened[0].pauses[1:])}


def _as_usage_error(function: Callable[[], T]) -> T:
    """Return the result of a function; turn an error of the file system into a UsageError.

    Raises:
        UsageError: the function raised an error.
    """
    try:
        return function()
    except (OSError, RuntimeError, CheckpointError) as error:
        # torch.save raises a RuntimeError on a full disk.
        raise UsageError(
            "HT901",
            f"the checkpoint cannot be measured: {str(error).splitlines()[0]}",
            "a file system with room, which this user may write to",
            "--size 100MB",
            "--run-dir DIR on another file system",
        ) from None


def _make_folder(run: str | None, undo: ExitStack) -> tuple[Path, Path]:
    """Return the run directory, and a new folder on its file system, removed at the end."""
    path = storage.run(run, os.environ)
    folder = Path(tempfile.mkdtemp(dir=storage.nearest(path), prefix=".hpctrain-bench-"))
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    return path, folder


def _fitting(folder: Path) -> int:
    """Return a size that fits and takes about two seconds; one digit and zeros, at most 1 GB."""
    free = shutil.disk_usage(folder).free
    most = min(_LARGEST, free / _ROOM / 2, _speed(folder, _TRIAL) * _SECONDS_OF_A_WRITE)
    memory = available()
    if memory is not None:
        most = min(most, memory / _COPIES / 2)
    return max(_rounded(most), _LEAST)


def _speed(folder: Path, size: int) -> float:
    """Return the bytes per second to disk of a trial file; it is smaller if space is short."""
    free = shutil.disk_usage(folder).free
    trial = torch.zeros(max(min(size, free // 4), 1), dtype=torch.uint8)
    write(folder / "trial", trial)  # the first write may have to wake the disk
    return len(trial) / write(folder / "trial", trial)


def _rounded(number: float) -> int:
    """Round a number down to one digit and zeros."""
    digits = str(int(number))
    return int(digits[0] + "0" * (len(digits) - 1))


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
    for free_bytes, needed, where in (
        (free, size * _ROOM, f"on the file system of {path}"),
        (memory, size * _COPIES, "of memory"),
    ):
        if free_bytes is not None and free_bytes < needed:
            raise UsageError(
                "HT901",
                f"{spell(free_bytes)} are free {where}, but a state of {spell(size)} needs "
                f"{spell(needed)}",
                "room for the new checkpoint and the previous one"
                if where != "of memory"
                else "room for the state, its copy, and the bytes of the reference writes",
                f"--size {spell(_rounded(free_bytes / needed * size)).replace(' ', '')}",
                "" if where == "of memory" else "--run-dir DIR on another file system",
            )


def refuse_slow(size: int, speed: float, timeout: float) -> None:
    """Raise an error if a write may take longer than the other ranks wait for rank 0.

    Args:
        size: bytes of the state.
        speed: bytes per second of a trial write.
        timeout: seconds after which a waiting rank considers another rank lost.

    Raises:
        UsageError: the write may take longer.
    """
    most = speed * timeout / _SLOWER
    if size > most:
        raise UsageError(
            "HT901",
            f"to write {spell(size)} takes about {size / speed:.0f} s here, but the other ranks "
            f"wait for {timeout:.0f} s",
            f"{timeout / _SLOWER:.0f} s or less, as torch.save may take several times as long",
            f"--size {spell(_rounded(most)).replace(' ', '')}",
            "start it in one process, for which no other rank waits",
        )


def evaluate(
    size: int, times: Mapping[str, list[float]], pauses: Sequence[float]
) -> dict[str, Any]:
    """Summarise the results of the arms.

    Args:
        size: bytes of the state.
        times: seconds until all is on the disk for each arm, one value per round.
        pauses: seconds that training waited for hpctrain; for torch.save it waits the whole time.
    """
    arms: dict[str, dict[str, Any]] = compare(times, BASE, "seconds")
    for arm in arms.values():
        arm["gigabytes_per_second"] = size / arm["seconds"]["median"] / 1e9
    pause = compare({BASE: times[BASE], OURS: pauses}, BASE, "seconds")[OURS]
    return {"arms": arms, "pause": pause}


def show(found: dict[str, Any]) -> str:
    """Format the results as a table with a row for each arm."""
    rows = [("", "training waits, s", "on the disk, s", "ratio", "GB/s")]
    for name, arm in found["arms"].items():
        pause = {BASE: arm["seconds"], OURS: found["pause"]["seconds"]}.get(name)
        rows.append(
            (
                name,
                describe(pause, ".3f") if pause else "",
                describe(arm["seconds"], ".3f"),
                describe(arm["ratio"], ".3f") if name != BASE else "",
                f"{arm['gigabytes_per_second']:.3g}",
            )
        )
    ratio = describe(found["pause"]["ratio"], ".3f")
    return "\n".join(
        [
            f"{spell(found['bytes'])}, half weights and half momenta, in {found['path']}",
            "",
            table(rows),
            "",
            "Medians over rounds, with 95 % intervals; ratios round by round.",
            f"Training waits {ratio} of the time that it waits for {BASE}.",
        ]
    )
