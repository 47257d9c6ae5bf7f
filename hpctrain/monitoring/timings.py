"""Parts of the step time by rank, and warnings about slow ranks."""

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain import rundir
from hpctrain.backends.base import Backend, Work
from hpctrain.cluster import system
from hpctrain.cluster.texts import ranks_text
from hpctrain.monitoring.slow_ranks import slow_ranks
from hpctrain.process.logging import logger
from hpctrain.process.phases import ACCUMULATING, BACKWARD, COMPUTING, LOADING, STEP
from hpctrain.rundir import RunDirectory

__all__ = ["Clock", "DeviceClock", "Timings"]

# Of each rank in a line: seconds per step of waiting for data and of the forward pass; the most
# bytes so far of the process, with those of its children now, and of its GPU; the mean number of
# cores at work; the share of the last second in which its GPU had work.
_COLUMNS = ("data", "forward", "memory", "gpu_memory", "cores", "gpu_use")
_NOT_SEEN = -1.0  # a number in a sum
# Seconds of training between two lines of timings.jsonl.
_SECONDS_BETWEEN_LINES = 30.0
# Shorter intervals do not show a slow rank: a single delay weighs too much.
_LEAST_SECONDS = 10.0
# Forward passes per interval that are timed on a GPU; their median counts.
_SAMPLES = 8

# By kind of slowness: what the rank does, and where to look for the cause.
_ADVICE = {
    "data": (
        "waiting for data",
        "look at its disk and its cores: top, iostat -x 1;"
        " more --workers, or the data on its own disk",
    ),
    "forward": (
        "the forward pass",
        "a hot or throttled GPU, or another job there: hpctrain doctor, nvidia-smi -q -d "
        "PERFORMANCE, top",
    ),
}


class Clock:
    """Clock that measures the phases of the loop in this process.

    Args:
        seconds: total seconds of each phase; updated by the watchdog.

    Attributes:
        seconds: the argument.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds

    def restart(self) -> None:
        """Begin an interval."""
        self._begun = self.seconds[COMPUTING]

    def forward(self, steps: int, micro_batches: int) -> float:
        """Return the seconds per step from batch to backward pass, in this interval.

        Args:
            steps: number of steps in the interval.
            micro_batches: number of micro-batches per step.
        """
        del micro_batches
        return (self.seconds[COMPUTING] - self._begun) / steps


class DeviceClock(Clock):
    """Clock that measures forward passes on the GPU, because the host only submits the work.

    A few passes of each interval are between two CUDA events; no code waits for these events.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(seconds)
        self._samples_left = 0
        self._first: torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def enter(self, phase: int) -> None:
        """Record the beginning of a phase; called several times per step."""
        if not self._samples_left:
            return
        if phase == COMPUTING:
            self._first = _event()
        elif phase in (ACCUMULATING, BACKWARD) and self._first is not None:
            self._pairs.append((self._first, _event()))
            self._first = None
            self._samples_left -= 1

    def restart(self) -> None:
        """Begin an interval."""
        self._pairs, self._samples_left = [], _SAMPLES

    def forward(self, steps: int, micro_batches: int) -> float:
        """Return the seconds per step in forward passes; 0 if the GPU has completed none yet."""
        del steps
        done = [
            first.elapsed_time(last) / 1000
            for first, last in self._pairs
            if last.query()  # type: ignore[no-untyped-call]
        ]
        return statistics.median(done) * micro_batches if done else 0.0


def _processor_seconds() -> float:
    """Return the processor time of this process and of its children, such as loader processes."""
    return math.fsum(one.seconds for one in system.stats(system.family(os.getpid())))


def _memory() -> float:
    """Return the most bytes so far of this process, and those of its children now."""
    own = system.peak_memory()
    return own + sum(map(system.private_memory, system.family(os.getpid())[1:]))


def _gpu_use(device: torch.device) -> float:
    """Return the share of the last second in which the GPU had work; -1 if nothing shows it."""
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # no nvidia-ml-py, or one of its own errors: not on MIG slices, no right
        return _NOT_SEEN


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Timings:
    """Writer of timings.jsonl, which also logs ranks that are slower than the others.

    Ranks wait for each other in the backward pass, so their steps take equally long. Waits for data
    and forward passes differ. About every half minute one sum collects these times from all ranks.
    It begins at the same step on all ranks and is read when it is complete. The first step of a
    start does not count, because it includes one-time work.

    Args:
        backend: backend that connects the ranks.
        clock: clock of this rank.
        hosts: host of each rank.
        directory: run directory.
        micro_batches: number of micro-batches per step on each rank.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        hosts: Sequence[str],
        directory: RunDirectory,
        micro_batches: int,
    ) -> None:
        self._backend, self._clock, self._hosts = backend, clock, hosts
        self._seconds = clock.seconds
        self._directory, self._micro_batches = directory, micro_batches
        self._ended = 0.0  # end of the last step, in seconds of steps
        self._last_due = 0.0  # `_ended` when the last line was due
        self._slow: dict[str, set[int]] = {kind: set() for kind in _ADVICE}
        self._failed = False
        self._sum: tuple[dict[str, Any], float, Work] | None = None  # line with incomplete sum
        self._restart()
        self._first = True  # whether the next step is the first one of this start

    def _restart(self) -> None:
        self._step_seconds: list[float] = []  # of each step of this interval
        self._waited = self._seconds[LOADING]
        self._clock.restart()

    def step(self) -> None:
        """Record the end of a step."""
        ended = sum(STEP(self._seconds))
        self._step_seconds.append(ended - self._ended)
        self._ended = ended
        if self._first:
            self._first = False
            self._restart()
            self._busy = _processor_seconds(), time.monotonic()

    def due(self) -> bool:
        """Return True on rank 0 when a line is due, only once; then all ranks must call `begin`."""
        if self._backend.rank or self._ended - self._last_due < _SECONDS_BETWEEN_LINES:
            return False
        self._last_due = self._ended
        return True

    def begin(self, step: int, epoch: int) -> None:
        """Begin a line; called by all ranks at the same step."""
        self._finish()
        steps = len(self._step_seconds)
        if self._first or not steps:
            return
        rank, size = self._backend.rank, self._backend.world_size
        waited = self._seconds[LOADING] - self._waited
        device = self._backend.device
        on_gpu = device.type == "cuda"
        (busy, begun), self._busy = self._busy, (_processor_seconds(), time.monotonic())
        own = [0.0] * (len(_COLUMNS) * size)
        own[rank::size] = (  # in the order of the columns
            waited / steps,
            self._clock.forward(steps, self._micro_batches),
            _memory(),
            torch.cuda.max_memory_reserved(device) if on_gpu else 0.0,
            max(0.0, self._busy[0] - busy) / max(self._busy[1] - begun, 1e-3),
            _gpu_use(device) if on_gpu else _NOT_SEEN,
        )
        buckets = Counter(
            math.floor(20 * math.log10(seconds * 1e6))
            for seconds in self._step_seconds
            if seconds > 0
        )
        line = {
            "step": step,
            "epoch": epoch,
            "time": time.time(),
            "steps": steps,
            "hosts": list(self._hosts),
            "step_times": {str(bucket): n for bucket, n in sorted(buckets.items())},
        }
        self._sum = line, sum(self._step_seconds), self._backend.sum_async(own)
        self._restart()

    def poll(self) -> None:
        """Write the line if its sum is complete."""
        if self._sum is not None and self._sum[2].ready():
            self._finish()

    def finish(self, step: int, epoch: int) -> None:
        """Write the last line; called by all ranks, which may wait for each other."""
        self.begin(step, epoch)
        self._finish()

    def _finish(self) -> None:
        if self._sum is None:
            return
        (line, seconds, work), self._sum = self._sum, None
        size = self._backend.world_size
        numbers = [round(number, 7) for number in work.values()]
        if self._backend.rank:
            return
        for number, name in enumerate(_COLUMNS):
            line[name] = numbers[number * size : (number + 1) * size]
        line["gpu_use"] = [None if use == _NOT_SEEN else use for use in line["gpu_use"]]
        try:
            rundir.append(self._directory.timings, json.dumps(line))
        except OSError as error:
            if not self._failed:
                logger.error("%s cannot be written: %s", self._directory.timings, error)
            self._failed = True
        if seconds >= _LEAST_SECONDS:
            for kind in _ADVICE:
                self._judge(kind, line[kind], seconds / line["steps"])

    def _judge(self, kind: str, numbers: Sequence[float], a_step: float) -> None:
        """Log the ranks that have become slow, and those that are no longer slow."""
        slow = set(slow_ranks(numbers, a_step))
        before, self._slow[kind] = self._slow[kind], slow
        cause, advice = _ADVICE[kind]
        if new := slow - before:
            most, median = max(numbers[rank] for rank in new), statistics.median_low(numbers)
            times = f"{1000 * most:.0f} ms a step, the median rank {1000 * median:.0f} ms"
            where = f"{ranks_text(new, self._hosts)}, {times} (a step takes {1000 * a_step:.0f} ms)"
            logger.warning("slow by %s: %s; %s", cause, where, advice)
        if well := before - slow:
            logger.info("no longer slow by %s: %s", cause, ranks_text(well, self._hosts))
