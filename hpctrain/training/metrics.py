"""Metrics of a run: averaged over the ranks without stopping them, written as lines of JSON."""

import contextlib
import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain import rundir
from hpctrain.backends.base import Backend
from hpctrain.errors import UsageError
from hpctrain.monitoring.progress import clock
from hpctrain.process.device import sums_on_host
from hpctrain.process.events import Events
from hpctrain.process.logging import logger
from hpctrain.rundir import POSITIONS, RunDirectory
from hpctrain.rundir.effective_time import EffectiveTime

__all__ = ["Metrics", "no_number", "table", "trim"]


# Values of one name in the steps of a row, on this rank: their sum, which is a tensor on a GPU; the
# number of micro-batches; and the sum of their counts of tokens, or None.
_Sum = list[Any]


@dataclass(slots=True)
class _Row:
    """A row that is not written yet; until it is `done`, its sums are those of this rank."""

    head: dict[str, Any]
    sums: dict[str, _Sum]
    tail: dict[str, float]
    training: bool
    numbers: dict[str, float] = field(default_factory=dict)
    done: bool = False

    def __str__(self) -> str:
        names = ", ".join(f"{name} ({times} times)" for name, (_, times, _) in self.sums.items())
        return f"{names} up to step {self.head['step']}"


class Metrics:
    """Rows of `metrics.jsonl`; rank 0 writes them.

    Values that are logged in every step make one row each `--log-every` steps: the means over these
    steps, their micro-batches and all ranks. A name that is logged in some steps only has a
    separate row with the number of that step. Their totals join a sum of `Consensus` when the one
    before it has confirmed that all ranks have the same rows: no step waits for them.

    How many rows a sum covers depends on the time, and in which order a library adds the numbers of
    the ranks depends on their place in the message. So with `--deterministic` each rank has a place
    of its own for each number, and the numbers are added in the order of the ranks.

    Args:
        backend: backend of the ranks to average over.
        directory: run directory.
        keep: number of rows that remain from earlier starts; see `trim`.
        events: told of each written row, at rank 0.

    Attributes:
        rows: number of rows written.
        confirmed: rows that all ranks have, whose totals join the next sum.
        last: newest value of each name.
    """

    def __init__(
        self, backend: Backend, directory: RunDirectory, keep: int, events: Events | None = None
    ) -> None:
        self._backend, self._events = backend, events or Events()
        self._on_host = sums_on_host(backend.device)
        self._in_order = torch.are_deterministic_algorithms_enabled() and backend.world_size > 2
        self._now: dict[str, _Sum] = {}  # values of the current step
        self._window: dict[str, _Sum] | None = None  # values of the steps since the last row
        self._last = (0, 0)  # the last of these steps, and its epoch
        self._unwritten: deque[_Row] = deque()
        self._gathered: list[_Row] = []  # rows that no sum of `Consensus` names yet
        self._offered: list[_Row] = []  # rows that the sum under way names
        self.confirmed: list[_Row] = []
        self._summed: list[_Row] = []  # rows whose totals are in the sum under way
        self._lines: _Lines | None = None
        self.rows = keep
        self.last: dict[str, float] = {}
        self._noted: tuple[int, dict[str, float]] = (-1, {})
        if backend.rank == 0:
            for row in directory.rows()[:keep]:
                self._remember(row)
            self._lines = _Lines(directory.metrics)

    def add(self, values: Mapping[str, Any], weight: Any = 1.0, counts: bool = False) -> None:
        """Add the values of one micro-batch; a tensor is only copied on its device.

        Args:
            values: values by name.
            weight: weight of the micro-batch in its step, or its count of tokens.
            counts: whether the weight is a count, which differs between ranks.

        Raises:
            UsageError: a value is no number.
        """
        now, on_host = self._now, self._on_host
        for name, value in values.items():
            try:
                # There is no device to wait for, and this is far cheaper than tensor arithmetic.
                number = (
                    value.item() if on_host and isinstance(value, Tensor) else self._number(value)
                )
            except (TypeError, ValueError, RuntimeError):
                raise no_number(name, value) from None
            if counts:
                number = _times(number, weight)
            elif weight != 1.0:
                number = number * weight
            if name in now:
                known = now[name]
                known[0] = known[0] + number
                known[1] += 1
                if counts:
                    known[2] = weight if known[2] is None else known[2] + weight
            else:
                now[name] = [number, 1, weight if counts else None]

    def numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values as numbers, which later changes of tensors do not change.

        Raises:
            UsageError: a value is no number.
        """
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = self._number(value)
            except (TypeError, ValueError, RuntimeError):
                raise no_number(name, value) from None
        return numbers

    def _number(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self._on_host:
            return float(value)
        number = value.detach().reshape(())
        return number.to(self._backend.device, torch.float64, non_blocking=True, copy=True)

    def end_step(self, step: int, epoch: int) -> None:
        """End a step; the values that were logged in it belong to it.

        Args:
            step, epoch: number of the step, from 1, and index of its epoch.
        """
        now, window = self._now, self._window
        self._now, self._last = {}, (step, epoch)
        if window is None:
            self._window = now
            return
        if now.keys() != window.keys():
            before = {name: window.pop(name) for name in list(window) if name not in now}
            self._gather(step - 1, epoch, before)
            fresh = {name: now.pop(name) for name in list(now) if name not in window}
            self._gather(step, epoch, fresh)
        for name, (total, times, tokens) in now.items():
            known = window[name]
            known[0] = known[0] + total
            known[1] += times
            if tokens is not None:
                known[2] = tokens if known[2] is None else known[2] + tokens

    def end_row(
        self, same: Mapping[str, Any] | None = None, tail: dict[str, float] | None = None
    ) -> None:
        """End a row after its last step, or after the training.

        Args:
            same: values that are the same on all ranks; they may be on the device.
            tail: values that need no average.
        """
        window, self._window = self._window, None
        if window:
            for name, value in (same or {}).items():
                window[name] = [self._number(value), 1, None]
            self._gather(*self._last, window, tail, training=True)

    def _gather(
        self,
        step: int,
        epoch: int,
        sums: dict[str, _Sum],
        tail: dict[str, float] | None = None,
        training: bool = False,
    ) -> None:
        if sums:
            row = _Row(_head(step, epoch), sums, tail or {}, training)
            self._unwritten.append(row)
            self._gathered.append(row)

    def waiting(self) -> str:
        """Describe the rows that are not confirmed on all ranks; the same text on all ranks."""
        return "; ".join(map(str, (*self._offered, *self._gathered))) or "nothing"

    def offer(self) -> list[Any]:
        """Let a new sum of `Consensus` name the waiting rows; return the totals that join it."""
        self._offered, self._gathered = self._gathered, []
        if self._backend.world_size == 1:
            self.confirmed += self._offered
        self._summed, self.confirmed = self.confirmed, []
        numbers = [number for row in self._summed for number in _numbers(row)]
        if self._in_order:
            ranks, own = range(self._backend.world_size), self._backend.rank
            return [number if rank == own else 0.0 for number in numbers for rank in ranks]
        return numbers

    def accept(self, totals: Sequence[float]) -> None:
        """Write the rows whose totals are there; those that the sum named are confirmed.

        Args:
            totals: those of `offer`, summed over the ranks.
        """
        values = iter(totals)
        places = self._backend.world_size if self._in_order else 1
        for row in self._summed:
            for name, (_, times, tokens) in row.sums.items():
                total = sum(islice(values, places))
                if tokens is None:
                    row.numbers[name] = total / (times * self._backend.world_size)
                else:
                    every = sum(islice(values, places))
                    row.numbers[name] = total / every if every else math.nan
            row.done = True
            if not row.training:
                self._note(row.head["step"], row.numbers)
        if self._backend.world_size > 1:
            self.confirmed += self._offered
        self._offered, self._summed = [], []
        self._write()

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the values of this rank for the next row."""
        if self._window is None:
            return {}
        return {
            name: [float(total), times, tokens if tokens is None else float(tokens)]
            for name, (total, times, tokens) in self._window.items()
        }

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        """Load the values that `state_dict` returned."""
        # Checkpoints of earlier versions have no count of tokens.
        self._window = {name: [*kept, None][:3] for name, kept in state.items()} or None

    def write(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write a row of values that are the same on all ranks, such as those of an evaluation.

        Args:
            step, epoch: position of the run.
            values: values by name.

        Raises:
            UsageError: a value is no number.
        """
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise no_number(name, value) from None
        row = _Row(_head(step, epoch), {}, numbers, training=False, done=True)
        self._unwritten.append(row)
        self._note(step, numbers)
        self._write()

    def at(self, step: int) -> dict[str, float]:
        """Return the values of a step that are not in a training row."""
        return self._noted[1] if self._noted[0] == step else {}

    def _note(self, step: int, numbers: Mapping[str, float]) -> None:
        self._noted = (step, {**self.at(step), **numbers})

    def close(self) -> None:
        """Close the file; rows that are not averaged yet are lost."""
        if self._lines is not None:
            self._lines.close()

    def _write(self) -> None:
        """Write the rows that are done, in their order."""
        while self._unwritten and self._unwritten[0].done:
            row = self._unwritten.popleft()
            numbers = {**row.numbers, **row.tail}
            self.rows += 1
            self._remember(numbers)
            if self._lines is not None:
                full = {**row.head, **numbers}
                self._lines.write(json.dumps(full) + "\n")
                self._events.row(full, row.training)

    def _remember(self, row: Mapping[str, Any]) -> None:
        self.last.update({k: v for k, v in row.items() if k not in POSITIONS})


def _times(mean: Any, tokens: Any) -> Any:
    """Return the sum behind a mean; the mean over no tokens may be NaN."""
    if isinstance(tokens, Tensor):
        return torch.where(tokens > 0, mean * tokens, 0.0)
    return mean * tokens if tokens else 0.0


def _numbers(row: _Row) -> Iterator[Any]:
    """Return the totals of a row, with the counts of those that are weighted by tokens."""
    for total, _, tokens in row.sums.values():
        yield total
        if tokens is not None:
            yield tokens


def _head(step: int, epoch: int) -> dict[str, Any]:
    return {"step": step, "epoch": epoch, "time": time.time()}


def no_number(name: str, value: Any) -> UsageError:
    """Return the error for a value that cannot be logged or summed."""
    if isinstance(value, Tensor):
        return UsageError("HT602.tensor-logged", name=name, shape=tuple(value.shape))
    return UsageError("HT602.value-logged", name=name, kind=type(value).__name__)


def trim(directory: RunDirectory, keep: int) -> None:
    """Remove the rows that an earlier start wrote after the checkpoint to resume from.

    Args:
        directory: run directory.
        keep: number of rows to keep.

    Raises:
        OSError: the file cannot be written.
    """
    kept = directory.rows()[:keep]
    rundir.replace(directory.metrics, "".join(json.dumps(row) + "\n" for row in kept))


class _Lines:
    """File to which whole lines are appended; a full disk does not end the training.

    Lines that cannot be written wait, and are written with a later line.

    Args:
        path: path of the file, which exists and ends in a whole line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._good = os.fstat(self._file).st_size  # bytes of whole lines
        self._waiting = b""

    def write(self, line: str) -> None:
        """Append a line."""
        full = bool(self._waiting)
        self._waiting += line.encode()
        try:
            written = os.write(self._file, self._waiting)
            if written < len(self._waiting):
                # Remove the incomplete line; truncating needs no free space.
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
        """Try once more to write the waiting lines, and close the file."""
        if self._waiting:
            self.write("")
        if lost := self._waiting.count(b"\n"):
            logger.error("%d rows of metrics could not be written to %s", lost, self._path)
        with contextlib.suppress(OSError):
            os.close(self._file)


# The score of the table: the first of these metrics that a run has.
_SCORES = (("top-1", "top1"), ("accuracy", "accuracy"), ("loss", "loss"))


def table(
    summary: Mapping[str, Any],
    transport: str,
    directory: RunDirectory,
    effective: EffectiveTime | None = None,
    used: Sequence[tuple[str, str]] = (),
) -> str:
    """Format the results of a run as a short table, without a row for what the run does not have.

    Args:
        summary: content of summary.json.
        transport: transport of the backend, such as "gloo".
        directory: run directory.
        effective: where the time of the run went; None if that is not recorded.
        used: what the run has used, as names and texts.
    """
    metrics, seconds, steps = summary["metrics"], summary["seconds"], directory.steps()
    scores = [(name, score) for name, score in _SCORES if score in metrics]
    shown = {
        **{name: f"{metrics[score]:.4f}" for name, score in scores[:1]},
        "samples/s": f"{summary['samples_per_second']:,.0f}",
        "time": clock(seconds) if seconds >= 60 else f"{seconds:.1f} s",
        **({"effective": effective.brief} if effective else {}),
        "ranks": str(summary["world_size"]),
        "backend": f"{summary['backend']} ({transport})",
        "precision": summary["precision"],
        **dict(used),
        **({"checkpoint": str(directory.checkpoint(steps[-1]))} if steps else {}),
        "run": str(directory.path),
    }
    return "".join(f"{name:<10} {value}\n" for name, value in shown.items())
