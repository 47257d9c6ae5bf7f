"""A rank as the helper of its host sees it: its shared memory, its process and its stacks.

The faulthandler of the rank writes the stacks of all its threads after a signal. It is C code in a
signal handler, so it works while C code holds the GIL. It does not work under a debugger, or while
the kernel blocks signals (state D).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from hpctrain.cluster import system
from hpctrain.monitoring.watchdog import evidence, shared_memory
from hpctrain.monitoring.watchdog.blame import Sighting
from hpctrain.monitoring.watchdog.limits import Limits
from hpctrain.process.phases import IDLE

__all__ = ["WatchedRank", "dump_collectives", "write_stacks"]

_SECONDS_TO_WRITE = 2.0
_SECONDS_TO_DUMP = 4.0  # torch looks at the FIFO about once a second
_SECONDS_BETWEEN_LOOKS = 0.005
_SAMPLES = 6  # per limit, in its second half
_SECONDS_BETWEEN_ASKS = 0.3


class WatchedRank(Sighting):
    """A rank of this host, whose observation is renewed by each look.

    Only time counts as silence in which the process could have sent a heartbeat.

    Args:
        facts: identity of the rank.
        host: name of this host.
        file: descriptor of the shared memory.
        start: offset of the rank's part in it.
        limits: learnt time-outs of the host.

    Attributes:
        facts, file, start: the arguments.
        heartbeat, count: time of the last heartbeat, and how often its phase had begun.
    """

    def __init__(
        self, facts: shared_memory.Facts, host: str, file: int, start: int, limits: Limits
    ) -> None:
        super().__init__(facts.rank, host, 0, IDLE, 0.0, facts.pid, "R")
        self.facts, self.file, self.start, self._limits = facts, file, start, limits
        self.heartbeat, self.count = 0.0, 0
        self._stopped = 0.0  # seconds in state T
        self._sample: evidence.Sample | None = None
        self._due = 0.0  # silence at which the next sample is taken
        self._unused: dict[int, float] = {}  # children that have not run, and since when
        self._asked = 0.0  # when the rank was last asked for its stacks
        self._text = start + shared_memory.STACK  # offset of the stacks that it then writes

    def look(self, now: float, elapsed: float) -> None:
        """Update the observation, `elapsed` seconds after the previous one."""
        before, phase, last, count = self.state, self.phase, self.heartbeat, self.count
        self.step, self.phase, self.heartbeat, self.count = shared_memory.PLACE.unpack(
            os.pread(self.file, shared_memory.PLACE.size, self.start)
        )
        self.state = self.process_state()
        self.waits_in = system.kernel_function(self.pid) if self.state == "D" else ""
        # Count only time in which this process was running: the whole job may be suspended.
        if self.heartbeat != last:
            if before not in ("T", "t"):
                self._limits.learn(phase, count, self.silence + elapsed)
            self.still, self.frame, self._sample, self._due = "", "", None, 0.0
            self.worker, self._unused = 0, {}
            self.silence = min(elapsed, max(0.0, now - self.heartbeat))
        else:
            self.silence += elapsed
        if before == "T" != self.state:
            self.silence = 0.0
        self.limit, self.slowest = self._limits.of(self.phase, self.count)
        # Nothing has to be learnt about a stopped process: it does not go on by itself.
        self._stopped = self._stopped + elapsed if before == self.state == "T" else 0.0
        if self._stopped:
            self.limit = min(self.limit, self.silence - self._stopped + self._limits.least)
        if self.counts and self.silence >= max(self.limit / 2, self._due):
            self._examine()
        wait = min(self._limits.least, self._limits.timeout) / 2
        if self.counts and self.state == "S" and self.silence >= wait / 6:
            known, children = self._unused, evidence.never_ran(self.pid)
            self._unused = {pid: known.get(pid, self.silence) for pid in children}
            due = [pid for pid, since in self._unused.items() if self.silence - since >= wait]
            self.worker = due[0] if due else 0

    def _examine(self) -> None:
        """Compare what the rank does with the sample before, and ask for the next stack."""
        self._due = self.silence + max(self.limit, self.silence) / _SAMPLES
        before = self._sample
        try:
            self._sample = evidence.take(self.pid, self.stack())
        except OSError:  # the process has just ended
            return
        self.still = evidence.conclusion(before, self._sample) if before else ""
        self.frame = self._sample.frame
        if not self._sample.stopped:
            self.ask()

    @property
    def counts(self) -> bool:
        """Whether the silence of the rank counts."""
        return self.inside and self.phase != IDLE

    def process_state(self) -> str:
        """Return the state letter now; empty if the process has ended."""
        now = system.stats([self.pid])
        return now[0].state if now and now[0].started == self.facts.started else ""

    def send(self, number: int) -> None:
        """Send a signal to the process; do nothing if it has ended."""
        if self.process_state():
            with contextlib.suppress(OSError):  # the process has just ended
                os.kill(self.pid, number)

    def ask(self) -> None:
        """Ask the rank for its stacks, unless it was asked a moment ago."""
        now = time.monotonic()
        if now - self._asked >= _SECONDS_BETWEEN_ASKS:
            self._asked = now
            self._text += len(shared_memory.text_at(self.file, self._text))
            self.send(system.SPARE_SIGNAL)

    def stack(self) -> str:
        """Return the stacks that the rank has written since it was last asked."""
        return shared_memory.text_at(self.file, self._text).decode(errors="replace")

    def sighting(self) -> Sighting:
        """Return the observation of this moment, for the other helpers."""
        return Sighting(*(getattr(self, field.name) for field in fields(Sighting)))


def write_stacks(ranks: Sequence[WatchedRank]) -> None:
    """Let the ranks write their stacks, and wait for it."""
    stopped = [rank for rank in ranks if rank.process_state() == "T"]
    running = [rank for rank in ranks if rank not in stopped]
    for rank in running:
        rank.ask()
    _await_files(lambda: [len(one.stack()) for one in running if one.process_state()])
    # A stopped process writes no stack, so it continues for the few milliseconds of the write.
    for rank in stopped:
        rank.ask()
        rank.send(signal.SIGCONT)
    _await_files(lambda: [len(one.stack()) for one in stopped if one.process_state()])
    for rank in stopped:
        rank.send(signal.SIGSTOP)


def dump_collectives(ranks: Sequence[WatchedRank]) -> list[str]:
    """Let torch's Flight Recorder write the collectives of the ranks; return the files."""
    asked = [rank.facts.dump for rank in ranks if rank.facts.dump and _ask(rank)]
    _await_files(lambda: [_size(path) for path in asked], _SECONDS_TO_DUMP)
    return [path for path in asked if _size(path)]


def _ask(rank: WatchedRank) -> bool:
    """Write into the FIFO of a rank; return whether torch reads it."""
    try:
        fifo = os.open(rank.facts.dump_request or "", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(fifo, b"1")
    os.close(fifo)
    return True


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _await_files(sizes: Callable[[], list[int]], seconds: float = _SECONDS_TO_WRITE) -> None:
    """Wait until all files have a size, and none grows; at most some seconds."""
    end, before = time.monotonic() + seconds, [0]
    while time.monotonic() < end:
        now = sizes()
        if now == before and all(now):
            return
        before = now
        time.sleep(_SECONDS_BETWEEN_LOOKS)
