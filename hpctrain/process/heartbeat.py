"""The heartbeat of a rank: the phase that it is in, for watchdog, clocks and step times."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from hpctrain.process.phases import IDLE, PHASES, WAITING

__all__ = ["Heartbeat", "PhaseClock"]


class PhaseClock(Protocol):
    """A clock that is told of each phase as it begins."""

    def enter(self, phase: int) -> None:
        """Record the beginning of a phase."""


class Heartbeat:
    """Phase and step of this rank, written to memory that the watchdog reads.

    A step enters several phases and can take microseconds. Between the kernels of a model this
    code is never in the processor's cache, so each additional call would cost microseconds. Items
    of a memoryview need no call.

    Attributes:
        step: optimizer steps done; written with the next phase.
        seconds: total seconds of this rank in each phase, without the current phase.
        clock: clock that measures on the device, or None.
    """

    __slots__ = ("_counts", "_last", "_numbers", "_since", "_times", "clock", "seconds", "step")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin at step 0."""
        self.step = 0
        self.clock: PhaseClock | None = None
        self.seconds = [0.0] * len(PHASES)
        self._counts = [0] * len(PHASES)
        self._last, self._since = IDLE, time.monotonic()
        self.write_to_nobody()

    def write_to(self, numbers: "memoryview[int]", times: "memoryview[float]") -> None:
        """Write to other memory from now on.

        Args:
            numbers: memory for step, phase, time.monotonic() of the heartbeat, and how often the
                phase has begun; as whole numbers of 64 bits.
            times: the same memory as floats, for the time.
        """
        self._numbers, self._times = numbers, times

    def write_to_nobody(self) -> None:
        """Write to memory that no other process reads."""
        memory = bytearray(_BYTES)
        self.write_to(memoryview(memory).cast("q"), memoryview(memory).cast("d"))

    def enter(self, phase: int) -> None:
        """Enter a phase of `hpctrain.process.phases`; in IDLE no progress is expected."""
        now = time.monotonic()
        self._counts[phase] += 1
        numbers = self._numbers
        numbers[0], numbers[1], numbers[3] = self.step, phase, self._counts[phase]
        self._times[2] = now
        self.seconds[self._last] += now - self._since
        self._last, self._since = phase, now
        if self.clock is not None:
            self.clock.enter(phase)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks, and return to the phase before."""
        before = self._last
        self.enter(WAITING)
        try:
            yield
        finally:
            self.enter(before)


_BYTES = 32
