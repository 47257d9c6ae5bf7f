"""Monitor of a run: progress, timings, slow ranks, trackers and a profile."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from hpctrain.arguments import Batches, Options
from hpctrain.errors import exit_codes
from hpctrain.monitoring import profiler, trackers
from hpctrain.monitoring.profiler import Profile
from hpctrain.monitoring.progress import Course, Lines, open_progress
from hpctrain.monitoring.timings import Clock, DeviceClock, Timings
from hpctrain.monitoring.trackers import About, Tracking
from hpctrain.process.logging import logger
from hpctrain.process.phases import LOADING
from hpctrain.rundir import RunDirectory
from hpctrain.training.context import Context

__all__ = ["Monitor", "check"]

# A query of the allocator costs more than the rest of a row.
_SECONDS_BETWEEN_LOOKS = 1.0


def check(options: Options, rank: int) -> None:
    """Check `--track` and `--profile`, before the rendezvous.

    Args:
        options: options of the session.
        rank: rank of this process; only rank 0 uses trackers.

    Raises:
        UsageError: a tracker is unknown or not installed, or `--profile` is no range of steps.
    """
    if rank == 0:
        trackers.find(options.track)
    if options.profile is not None:
        profiler.steps(options.profile)


class Monitor:
    """Monitor of a run on one rank; rank 0 shows the results. No step waits for it.

    Args:
        context: context of the training.
        directory: run directory.
        name: name of the run.
        seconds: seconds that this rank has spent in each phase of the loop; the watchdog counts
            them.

    Attributes:
        timings: timings of all ranks, whose lines the run begins and ends.
    """

    def __init__(self, context: Context, directory: RunDirectory, name: str) -> None:
        options, world, roster = context.options, context.world, context.roster
        self._context, self._directory, self._name = context, directory, name
        on_gpu = context.device.type == "cuda"
        heartbeat = context.events.heartbeat
        self._clock = Clock(heartbeat.seconds)
        if on_gpu:
            self._clock = heartbeat.clock = DeviceClock(heartbeat.seconds)
        hosts, accumulate = roster.host_names, context.batches.accumulate
        self.timings = Timings(context.backend, self._clock, hosts, directory, accumulate)
        self._progress = Lines(Course(options.max_steps))
        self._draws = False
        self._tracking: Tracking | None = None
        self._profile: Profile | None = None
        if options.profile is not None and world.rank == 0:
            path = directory.profile / f"rank-{world.rank}.json.gz"
            self._profile = Profile(profiler.steps(options.profile), context.device, path)
        self._seconds = self._lap = self._waited = 0.0
        self._trained = self._lap_step = self._first = 0
        self._samples = context.batches.global_batch  # samples per step
        self._memory: tuple[float, int] | None = None  # time and result of the last query

    def begin(self, step: int) -> None:
        """Begin training: start the trackers and the progress display at rank 0.

        Args:
            step: step at which this start continues.
        """
        context = self._context
        if context.world.rank:
            return
        options = {**context.own_options, **asdict(context.options)}
        about = About(self._name, self._directory, options, step)
        if kinds := trackers.find(context.options.track):
            self._tracking = Tracking(kinds, about)
        self._progress = open_progress(self._progress.course)
        self._draws = type(self._progress) is not Lines

    def evaluated(self, number: int, count: int) -> None:
        """Show the progress of an evaluation at rank 0.

        Args:
            number: number of the batch, from 0.
            count: number of batches of this rank.
        """
        if self._context.world.rank == 0:
            self._progress.evaluates(number, count)

    def begin_batches(
        self, step: int, epoch: int, epoch_step: int, epochs: int | None, length: int | None
    ) -> None:
        """Begin the batches of an epoch.

        Args:
            step: number of steps done.
            epoch: index of the epoch, from 0.
            epoch_step: number of steps done in this epoch.
            epochs: number of epochs of the run; None if only a number of steps ends it.
            length: number of steps in an epoch; None if unknown.
        """
        self._progress.course.begin(step, epoch, epoch_step, epochs, length)
        if self._profile is not None:
            self._profile.at(step)
        self._lap, self._lap_step = time.perf_counter(), step
        self._begun, self._first = self._lap, step
        self._waited = self._clock.seconds[LOADING]

    def end_batches(self, step: int) -> None:
        """End the batches of an epoch, at this step."""
        self._seconds += time.perf_counter() - self._begun
        self._trained += (step - self._first) * self._samples
        self._progress.end_epoch(step)

    def ahead(self, step: int) -> tuple[int | None, float | None]:
        """Return the steps of the run, and the estimated seconds to its end; None if unknown."""
        course = self._progress.course
        return course.end, course.seconds_left(step)

    def see_samples(self, count: int) -> None:
        """Take the number of samples in a step from a loader created by the script.

        Args:
            count: samples of the first micro-batch on this rank; speeds are computed from it.
        """
        accumulate, size = self._context.batches.accumulate, self._context.world.world_size
        batches = Batches(count * accumulate * size, count, accumulate)
        if batches.global_batch != self._samples:
            self._samples = batches.global_batch
            logger.info("the loader's batches have %d samples: %s", count, batches)

    def step(self, step: int) -> None:
        """Record the end of a step, with the number of steps done."""
        self.timings.step()
        if self._draws:
            self._progress.step(step)
        if self._profile is not None:
            self._profile.at(step)

    def lap(self, step: int) -> dict[str, float]:
        """Return speed, data wait and GPU memory for a row of metrics.

        Args:
            step: step of the row; speed and data wait are those since the row before.
        """
        now, waited = time.perf_counter(), self._clock.seconds[LOADING]
        seconds = now - self._lap
        samples = (step - self._lap_step) * self._samples
        tail = {
            "samples_per_second": samples / seconds,
            "data_wait": round((waited - self._waited) / seconds, 4),
        }
        self._lap, self._lap_step, self._waited = now, step, waited
        if self._context.device.type == "cuda":
            tail["gpu_memory"] = self._peak(now)
        return tail

    def _peak(self, now: float) -> int:
        """Return the peak of the GPU memory used by tensors, in bytes."""
        if self._memory is None or now > self._memory[0] + _SECONDS_BETWEEN_LOOKS:
            self._memory = now, torch.cuda.max_memory_allocated(self._context.device)
        return self._memory[1]

    def row(self, row: Mapping[str, Any], training: bool) -> None:
        """Show a row of metrics, and pass it to the trackers; called at rank 0.

        Args:
            row: row as in metrics.jsonl.
            training: whether it is a training row.
        """
        self._progress.row(row, training)
        if self._tracking is not None:
            self._tracking.row(row)

    def facts(self) -> dict[str, float]:
        """Return the training time in seconds, and the samples per second."""
        speed = self._trained / self._seconds if self._seconds else 0.0
        return {"seconds": self._seconds, "samples_per_second": speed}

    def close(self, step: int) -> None:
        """Close everything except the trackers.

        Args:
            step: number of steps done.
        """
        # After an error, the batches of the loop are closed later than the run.
        progress, self._progress = self._progress, Lines(self._progress.course)
        try:
            progress.close()
        finally:
            if self._profile is not None:
                self._profile.close(step)

    def close_trackers(self, code: int) -> None:
        """Close the trackers within a limited time, as the other ranks wait meanwhile.

        Args:
            code: exit code of `exit_codes` that the run ended with.
        """
        if self._tracking is not None:
            self._tracking.close(exit_codes.STATUS[code], self._context.options.timeout)
