"""Numbers of a run: averaged over the ranks without stopping them, written as lines of JSON."""

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from hpctrain import rundir
from hpctrain.backends.base import Backend, Later
from hpctrain.rundir import RunDirectory
from hpctrain.speech import logger

__all__ = ["Metrics"]

# People cannot read more, and saying a row costs more than writing it.
_SECONDS_BETWEEN_LINES = 1.0


@dataclass(slots=True)
class _Row:
    """A training row whose averages are still under way."""

    head: dict[str, Any]
    names: list[str]
    sums: Later
    tail: dict[str, float]


class Metrics:
    """The rows of `metrics.jsonl`; rank 0 writes them.

    A training row is averaged over all micro-batches of its step, on all ranks. The sum is begun
    at the step and read when it has arrived, so no step waits for it.

    Args:
        backend: over whose ranks to average.
        directory: of the run.
        keep: rows to keep of an earlier start; those after them are removed.
        micro_batches: of one step, over all ranks.
    """

    def __init__(
        self, backend: Backend, directory: RunDirectory, keep: int, micro_batches: int
    ) -> None:
        self._backend = backend
        self._micro_batches = micro_batches
        self._on_host = backend.device.type == "cpu"
        self._step: dict[str, Any] = {}  # tensors on a GPU, Python floats on a CPU
        self._under_way: deque[_Row] = deque()
        self._file: IO[str] | None = None
        self._said = 0.0  # when the last training row was said
        self.rows = keep
        self.last: dict[str, float] = {}
        if backend.rank == 0:
            kept = directory.rows()[:keep]
            for row in kept:
                self._remember(row)
            rundir.replace(directory.metrics, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = open(directory.metrics, "a", buffering=1)  # noqa: SIM115, closed by close()

    def add(self, values: Mapping[str, Any]) -> None:
        """The values of one micro-batch; of a tensor only a copy on its device is taken."""
        for name, value in values.items():
            number: Any
            if self._on_host:
                # No device to wait for, and far cheaper than arithmetic on tensors.
                number = value.item() if isinstance(value, Tensor) else float(value)
            else:
                number = torch.as_tensor(value, dtype=torch.float64, device=self._backend.device)
                number = number.detach().reshape(())
            known = self._step.get(name)
            self._step[name] = number if known is None else known + number

    def end_step(self, head: dict[str, Any], tail: dict[str, float]) -> None:
        """Begin to average what the micro-batches of a step have added.

        Args:
            head: the row's step and epoch.
            tail: values that need no average.
        """
        if not self._step:
            return
        names = sorted(self._step)
        numbers = [self._step[name] for name in names]
        if self._on_host:
            vector = torch.tensor(numbers, dtype=torch.float64)
        else:
            vector = torch.stack(numbers)
        self._step = {}
        head["time"] = time.time()
        self._under_way.append(_Row(head, names, self._backend.sum_later(vector), tail))

    def poll(self) -> None:
        """Write the rows that have arrived."""
        while self._under_way and self._under_way[0].sums.ready():
            self._finish(self._under_way.popleft())

    def flush(self) -> None:
        """Wait for all rows and write them."""
        while self._under_way:
            self._finish(self._under_way.popleft())

    def write(self, head: dict[str, Any], values: Mapping[str, Any]) -> None:
        """A row of values that are the same on all ranks, such as those of an evaluation."""
        self.flush()
        numbers = {name: float(value) for name, value in values.items()}
        self._write({**head, "time": time.time(), **numbers})
        self._say({**head, **numbers})

    def close(self) -> None:
        """Close the file; rows that are under way are lost unless `flush` was called."""
        if self._file is not None:
            self._file.close()

    def _finish(self, row: _Row) -> None:
        values = [value / self._micro_batches for value in row.sums.values()]
        numbers = {**dict(zip(row.names, values, strict=True)), **row.tail}
        self._write({**row.head, **numbers})
        if row.head["time"] >= self._said + _SECONDS_BETWEEN_LINES:
            self._said = row.head["time"]
            self._say({**row.head, **numbers})

    def _write(self, row: dict[str, Any]) -> None:
        self.rows += 1
        self._remember(row)
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")

    def _say(self, row: Mapping[str, Any]) -> None:
        """Show a row to people; all of them are in the file."""
        if self._file is not None:
            shown = (f"{name} {value:.5g}" for name, value in row.items() if name != "time")
            logger.info("%s", "  ".join(shown))

    def _remember(self, row: Mapping[str, Any]) -> None:
        self.last.update({k: v for k, v in row.items() if k not in ("step", "epoch", "time")})
