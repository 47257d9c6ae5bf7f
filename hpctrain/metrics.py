"""Numbers of a run: averaged over the ranks without stopping them, written as lines of JSON."""

import contextlib
import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain import rundir
from hpctrain.backends.base import Backend, Later
from hpctrain.rundir import RunDirectory
from hpctrain.speech import logger

__all__ = ["Metrics", "table", "trim"]

# A sum over the ranks takes about this long to come by, or this many rows.
_SECONDS_BETWEEN_SUMS = 1.0
_MOST_ROWS = 32


@dataclass(slots=True)
class _Row:
    """A row that is not written yet: its numbers are sums of this rank until it is `done`."""

    head: dict[str, Any]
    names: list[str]
    numbers: list[Any]
    tail: dict[str, float]
    done: bool = False


class Metrics:
    """The rows of `metrics.jsonl`; rank 0 writes them.

    A training row is averaged over all micro-batches of its step, on all ranks. That takes one
    sum for all rows of about a second, begun at the same row on every rank and read when it has
    arrived, so no step waits for it and quick steps do not pay for it.

    Args:
        backend: over whose ranks to average.
        directory: of the run.
        keep: rows that are there of an earlier start; see `trim`.
        accumulate: micro-batches of one step on each rank.
        heard: called at rank 0 with each row that is written, and whether it is one of training.

    Attributes:
        rows: that are written.
        last: the newest value of each name.
    """

    def __init__(
        self,
        backend: Backend,
        directory: RunDirectory,
        keep: int,
        accumulate: int,
        heard: Callable[[Mapping[str, Any], bool], None] = lambda row, training: None,
    ) -> None:
        self._backend = backend
        self._accumulate, self._heard = accumulate, heard
        self._micro_batches = accumulate * backend.world_size
        self._on_host = backend.device.type == "cpu"
        self._step: dict[str, Any] = {}  # tensors on a GPU, Python floats on a CPU
        self._unwritten: deque[_Row] = deque()
        self._gathered: list[_Row] = []  # the rows of the next sum
        self._rows_per_sum = 1
        self._sum: tuple[list[_Row], Later] | None = None  # under way
        self._sum_begun = time.perf_counter()
        self._seconds_per_row = 0.0  # a mean over the ranks, so it is the same on all of them
        self._lines: _Lines | None = None
        self.rows = keep
        self.last: dict[str, float] = {}
        self._noted: tuple[int, dict[str, float]] = (-1, {})
        if backend.rank == 0:
            for row in directory.rows()[:keep]:
                self._remember(row)
            self._lines = _Lines(directory.metrics)

    def add(self, values: Mapping[str, Any], weight: float = 1.0) -> None:
        """The values of one micro-batch; of a tensor only a copy on its device is taken.

        Args:
            values: by name.
            weight: of the micro-batch in its step.
        """
        for name, value in values.items():
            number: Any
            if self._on_host:
                # No device to wait for, and far cheaper than arithmetic on tensors.
                number = value.item() if isinstance(value, Tensor) else float(value)
            elif isinstance(value, Tensor):
                number = value.detach().reshape(())
                number = number.to(self._backend.device, torch.float64, non_blocking=True)
            else:
                number = float(value)  # made a tensor of where the row is summed
            if weight != 1.0:
                number = number * weight
            known = self._step.get(name)
            self._step[name] = number if known is None else known + number

    def end_step(
        self, head: dict[str, Any], same: Mapping[str, Any], tail: dict[str, float]
    ) -> None:
        """Make a row of what the micro-batches of a step have added; called by all ranks.

        Args:
            head: the row's step and epoch.
            same: values that are the same on all ranks, and may be on the device.
            tail: values that need no average.
        """
        if not self._step:
            return
        self.add(same, self._accumulate)
        names = sorted(self._step)
        head["time"] = time.time()
        row = _Row(head, names, [self._step[name] for name in names], tail)
        self._step = {}
        self._unwritten.append(row)
        self._gathered.append(row)
        if len(self._gathered) >= self._rows_per_sum:
            self._begin()

    def poll(self) -> None:
        """Write the rows whose sum has arrived."""
        if self._sum is not None and self._sum[1].ready():
            self._finish()

    def flush(self) -> None:
        """Average and write all rows; called by all ranks."""
        if self._gathered:
            self._begin()
        self._finish()

    def write(self, head: dict[str, Any], values: Mapping[str, Any]) -> None:
        """A row of values that are the same on all ranks, such as those of an evaluation."""
        numbers = {name: float(value) for name, value in values.items()}
        self._unwritten.append(_Row({**head, "time": time.time()}, [], [], numbers, done=True))
        known = self._noted[1] if self._noted[0] == head["step"] else {}
        self._noted = (head["step"], {**known, **numbers})
        self._write()

    def at(self, step: int) -> dict[str, float]:
        """What `write` was given at a step."""
        return self._noted[1] if self._noted[0] == step else {}

    def close(self) -> None:
        """Close the file; rows that are not averaged yet are lost unless `flush` was called."""
        if self._lines is not None:
            self._lines.close()

    def _begin(self) -> None:
        """Begin the sum of the gathered rows, when that before it is there."""
        self._finish()
        if self._seconds_per_row:
            # Only here, where all ranks are at the same row, or they would gather unlike.
            wanted = int(_SECONDS_BETWEEN_SUMS / self._seconds_per_row)
            self._rows_per_sum = max(1, min(wanted, 2 * self._rows_per_sum, _MOST_ROWS))
        now = time.perf_counter()
        numbers = [number for row in self._gathered for number in row.numbers]
        sums = self._backend.sum_later([*numbers, now - self._sum_begun])
        self._sum, self._gathered, self._sum_begun = (self._gathered, sums), [], now

    def _finish(self) -> None:
        """Wait for the sum that is under way, and write its rows."""
        if self._sum is None:
            return
        rows, sums = self._sum
        self._sum = None
        *values, seconds = sums.values()
        self._seconds_per_row = seconds / self._backend.world_size / len(rows)
        position = 0
        for row in rows:
            end = position + len(row.numbers)
            row.numbers = [value / self._micro_batches for value in values[position:end]]
            row.done = True
            position = end
        self._write()

    def _write(self) -> None:
        """Write the rows that are done, in their order."""
        while self._unwritten and self._unwritten[0].done:
            row = self._unwritten.popleft()
            numbers = {**dict(zip(row.names, row.numbers, strict=True)), **row.tail}
            self.rows += 1
            self._remember(numbers)
            if self._lines is not None:
                full = {**row.head, **numbers}
                self._lines.write(json.dumps(full) + "\n")
                self._heard(full, bool(row.names))

    def _remember(self, row: Mapping[str, Any]) -> None:
        self.last.update({k: v for k, v in row.items() if k not in ("step", "epoch", "time")})


def trim(directory: RunDirectory, keep: int) -> None:
    """Remove the rows that an earlier start wrote after the checkpoint from which it goes on.

    Args:
        directory: of the run.
        keep: rows.

    Raises:
        OSError: the file cannot be written.
    """
    kept = directory.rows()[:keep]
    rundir.replace(directory.metrics, "".join(json.dumps(row) + "\n" for row in kept))


class _Lines:
    """A file to which whole lines are added; training does not end with a full disk.

    What could not be written waits, and goes out with a later line.

    Args:
        path: of the file, which is there and ends in a whole line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._good = os.fstat(self._file).st_size  # bytes that are whole lines
        self._waiting = b""

    def write(self, line: str) -> None:
        """Add a line."""
        full = bool(self._waiting)
        self._waiting += line.encode()
        try:
            written = os.write(self._file, self._waiting)
            if written < len(self._waiting):
                # Half a line is worse than none, and truncating needs no room.
                os.ftruncate(self._file, self._good)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._good += written
            self._waiting = b""
        except OSError as error:
            if not full:
                logger.error(
                    "rows of metrics wait, as %s cannot be written: %s    df -h shows the room",
                    self._path,
                    error,
                )

    def close(self) -> None:
        """Try once more, and close."""
        if self._waiting:
            self.write("")
        with contextlib.suppress(OSError):
            os.close(self._file)


def table(summary: Mapping[str, Any], transport: str, path: Path) -> str:
    """A run in a few lines for people.

    Args:
        summary: the content of summary.json.
        transport: what carried the numbers, such as "gloo".
        path: of the run directory.
    """
    metrics = summary["metrics"]
    name, score = (
        ("loss", "loss") if "top1" not in metrics and "loss" in metrics else ("top-1", "top1")
    )
    shown = {
        name: f"{metrics[score]:.4f}" if score in metrics else "-",
        "images/s": f"{summary['samples_per_second']:,.0f}",
        "time": f"{summary['seconds']:.1f} s",
        "ranks": str(summary["world_size"]),
        "backend": f"{summary['backend']} ({transport})",
        "precision": summary["precision"],
        "run": str(path),
    }
    return "".join(f"{name:<10} {value}\n" for name, value in shown.items())
