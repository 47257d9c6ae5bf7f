"""What people see of a run while it goes on: progress, timings, slow ranks, trackers, a trace."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from hpctrain import rundir
from hpctrain.arguments import Options
from hpctrain.monitoring import profiler, trackers
from hpctrain.monitoring.profiler import Profile
from hpctrain.monitoring.progress import Course, Lines, open_progress
from hpctrain.monitoring.timings import Clock, DeviceClock, Phases, Timings
from hpctrain.monitoring.trackers import About, Tracking
from hpctrain.monitoring.watchdog import (
    ACCUMULATING,
    AGREEING,
    BACKWARD,
    COMPUTING,
    EVALUATING,
    LOADING,
)
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory
from hpctrain.training.state import Parts

__all__ = ["Monitor", "check"]

_PHASES = Phases(LOADING, COMPUTING, (ACCUMULATING, BACKWARD), slice(LOADING, AGREEING + 1))
# Asking the allocator costs more than all else in a row.
_SECONDS_BETWEEN_LOOKS = 1.0


def check(options: Options, rank: int) -> None:
    """Look at `--track` and `--profile`, before the ranks meet.

    Args:
        options: of the session.
        rank: of this process: the first one alone uses trackers.

    Raises:
        UsageError: a tracker that is unknown or not installed, or steps that are none.
    """
    trackers.parse(options.track, here=rank == 0)
    if options.profile is not None:
        profiler.steps(options.profile)


class Monitor:
    """Made by every rank; rank 0 shows what is seen. No step waits for any of it.

    Args:
        parts: the session.
        directory: of the run.
        name: of the run.
        seconds: that this rank has been in each phase of the loop; the watchdog counts them.
    """

    def __init__(
        self, parts: Parts, directory: RunDirectory, name: str, seconds: Sequence[float]
    ) -> None:
        options, world, roster = parts.options, parts.world, parts.roster
        check(options, world.rank)
        self._parts, self._directory, self._name = parts, directory, name
        on_gpu = parts.device.type == "cuda"
        self._clock = (DeviceClock if on_gpu else Clock)(_PHASES, seconds)
        hosts = [roster.hosts[host] for host in roster.host_of_rank]
        self._timings = Timings(
            parts.backend, self._clock, hosts, directory, parts.batches.accumulate
        )
        self._progress = Lines(Course(options.max_steps))
        self._draws = False
        self._tracking: Tracking | None = None
        self._profile: Profile | None = None
        if options.profile is not None and world.rank == 0:
            path = directory.profile / f"rank-{world.rank}.json.gz"
            self._profile = Profile(profiler.steps(options.profile), parts.device, path)
        self._seconds = self._lap = self._waited = 0.0
        self._trained = self._lap_step = self._first = 0
        self._samples = parts.batches.global_batch  # of a step
        self._memory: tuple[float, int] | None = None  # when it was asked for, and the answer

    def begin(self, step: int) -> None:
        """Training begins.

        Args:
            step: at which this start goes on.
        """
        parts = self._parts
        if parts.world.rank:
            return
        options = {**parts.own_options, **asdict(parts.options)}
        about = About(self._name, self._directory, options, step)
        if names := trackers.parse(parts.options.track, here=True):
            self._tracking = Tracking(names, about)
        self._progress = open_progress(self._progress.course)
        self._draws = type(self._progress) is not Lines

    def beside(self, heartbeat: Callable[[int], None]) -> Callable[[int], None]:
        """What is called as a phase begins: `beat`, and what is seen of the phase here.

        Args:
            beat: of the watchdog.
        """
        enter = self._clock.enter if isinstance(self._clock, DeviceClock) else None
        if enter is None and not self._draws:
            return heartbeat

        def both(phase: int) -> None:
            heartbeat(phase)
            if enter is not None:
                enter(phase)
            if phase == EVALUATING:
                self._progress.evaluates()

        return both

    def begin_batches(
        self, step: int, epoch: int, epoch_step: int, epochs: int | None, length: int | None
    ) -> None:
        """The batches of an epoch begin.

        Args:
            step: steps done.
            epoch: from 0.
            epoch_step: steps of it that are done.
            epochs: of the run; None where only a number of steps ends it.
            length: steps of an epoch; None where nobody knows.
        """
        self._progress.course.begin(step, epoch, epoch_step, epochs, length)
        if self._profile is not None:
            self._profile.at(step)
        self._lap, self._lap_step = time.perf_counter(), step
        self._begun, self._first = self._lap, step
        self._waited = self._clock.seconds[LOADING]

    def end_batches(self, step: int) -> None:
        """They are at their end, at this step."""
        self._seconds += time.perf_counter() - self._begun
        self._trained += (step - self._first) * self._samples
        self._progress.end_epoch(step)

    def see_samples(self, count: int) -> None:
        """A loader of the script's own begins an epoch.

        Args:
            count: samples of its first micro-batch on this rank; speeds follow from it.
        """
        batches, size = self._parts.batches, self._parts.world.world_size
        samples = count * batches.accumulate * size
        if samples != self._samples:
            self._samples = samples
            logger.info(
                "the loader's batches have %d samples: global batch %d = %d × %d × %d",
                count,
                samples,
                count,
                batches.accumulate,
                size,
            )

    def step(self, step: int) -> None:
        """A step is done, which makes so many."""
        self._timings.step()
        if self._draws:
            self._progress.step(step)
        if self._profile is not None:
            self._profile.at(step)

    def lap(self, step: int) -> dict[str, float]:
        """What a row of metrics says of the time since the one before.

        Args:
            step: of the row.
        """
        now, waited = time.perf_counter(), self._clock.seconds[LOADING]
        seconds = now - self._lap
        samples = (step - self._lap_step) * self._samples
        tail = {
            "samples_per_second": samples / seconds,
            "data_wait": round((waited - self._waited) / seconds, 4),
        }
        self._lap, self._lap_step, self._waited = now, step, waited
        if self._parts.device.type == "cuda":
            tail["gpu_memory"] = self._peak(now)
        return tail

    def _peak(self, now: float) -> int:
        """Bytes of GPU memory that tensors have had at most."""
        if self._memory is None or now > self._memory[0] + _SECONDS_BETWEEN_LOOKS:
            self._memory = now, torch.cuda.max_memory_allocated(self._parts.device)
        return self._memory[1]

    def row(self, row: Mapping[str, Any], training: bool) -> None:
        """A row of metrics is written, at rank 0.

        Args:
            row: as in metrics.jsonl.
            training: whether it is one of training.
        """
        self._progress.row(row, training)
        if self._tracking is not None:
            self._tracking.row(row)

    def due(self) -> bool:
        """Whether rank 0 wants to know where the ranks' time goes; the others have to be told."""
        return self._timings.due()

    def hear(self, due: bool, step: int, epoch: int) -> None:
        """Called by all ranks about once a second, at the same step.

        Args:
            due: whether rank 0 wanted to know.
            step, epoch: of the run.
        """
        self._timings.poll()
        if due:
            self._timings.begin(step, epoch)

    def finish(self, step: int, epoch: int) -> None:
        """Training is over; called by all ranks, which may wait for each other."""
        self._timings.finish(step, epoch)

    def facts(self) -> dict[str, float]:
        """How long it took, and how fast it was."""
        speed = self._trained / self._seconds if self._seconds else 0.0
        return {"seconds": self._seconds, "samples_per_second": speed}

    def close(self, step: int) -> None:
        """Let go of everything but the trackers.

        Args:
            step: steps done.
        """
        # The batches of a loop that an error has left are closed later than the run.
        progress, self._progress = self._progress, Lines(self._progress.course)
        try:
            progress.close()
        finally:
            if self._profile is not None:
                self._profile.close(step)

    def close_trackers(self, code: int) -> None:
        """Let the trackers finish. The other ranks wait meanwhile, so it takes no long time.

        Args:
            code: how the run ended; of `rundir`.
        """
        if self._tracking is not None:
            self._tracking.close(rundir.STATUS[code], self._parts.options.timeout)
