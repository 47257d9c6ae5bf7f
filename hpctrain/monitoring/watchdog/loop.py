"""Main loop of a helper: observe the ranks, judge, show their stacks, kill them."""

import contextlib
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import system
from hpctrain.errors import exit_codes
from hpctrain.monitoring.watchdog import evidence, shared_memory
from hpctrain.monitoring.watchdog.blame import (
    Blame,
    Sighting,
    apart,
    describe,
    hung,
    judge,
    place,
    suspended,
    without_worker,
)
from hpctrain.monitoring.watchdog.helper_exchange import Aside, HelperExchange
from hpctrain.monitoring.watchdog.limits import FACTOR, Limits
from hpctrain.monitoring.watchdog.rank import WAKE
from hpctrain.monitoring.watchdog.watched_rank import WatchedRank, dump_collectives, write_stacks
from hpctrain.process.failure_record import note_failure
from hpctrain.process.phases import CLOSED
from hpctrain.rundir.exit_status import write_exit_status

__all__ = ["Watch"]

_LOOKS = 20  # looks per shortest time-out
_MOST_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_FOR_FILES = 5.0  # the helper continues without a slower file system
# Time for the helpers of other hosts to find the judgement and end their ranks at the same time.
_SECONDS_TO_AGREE = 3.0
_SECONDS_TO_DIE = 10.0
# Silence after which the helpers exchange observations. Ranks that hang, or wait at two places, are
# observed for as long again before they end: an observation from another host may be old.
_SECONDS_SILENT = 5.0
# After so long without processor time a warning is printed, before any time-out ends.
_SECONDS_WITHOUT_PROCESSOR = 40.0
# Threads of libraries, which run no Python.
_NO_FRAME = re.compile(r"Thread 0x.*\n  <no Python frame>\n\n")


class Watch:
    """The helper of a host, which watches its ranks.

    Args:
        path: file with the shared memory of the ranks.
        clock: function that returns seconds, like `time.monotonic`; tests replace it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._file = os.open(path, os.O_RDONLY)
        settings = shared_memory.read_settings(self._file)
        self._host, self._hosts = settings["host"], settings["hosts"]
        self._world_size: int = settings["world_size"]
        self._timeout: float = settings["timeout"]
        self._limits = Limits(self._timeout, settings["least"])
        self._directory = rundir.RunDirectory(settings["directory"])
        self._log = self._directory.logs / f"watch-{self._host}.log"
        self._exchange = HelperExchange(
            self._directory.path, settings["key"], self._host, settings["rank"]
        )
        self._first = settings["node_rank"] == 0
        self._hung: tuple[float, list[Sighting]] | None = None  # when and how first observed
        shortest = min(self._timeout, settings["least"])
        self._interval = min(_MOST_SECONDS_BETWEEN_LOOKS, shortest / _LOOKS)
        self._expected: int = settings["local_world_size"]
        self._ranks: dict[int, WatchedRank] = {}  # by local rank
        # Silence, and processor seconds of all ranks, when a processor was last used.
        self._unused: tuple[float, float] | None = None
        self._warned = False
        self._posted: float | None = None  # when silence was last published
        self._last = clock()  # time of the last look at the ranks
        self._suspended = False  # whether all ranks of the run were stopped
        self._files, self._standard_error = Aside(_SECONDS_FOR_FILES), Aside(_SECONDS_FOR_FILES)

    def run(self) -> None:
        """Watch until no rank is left."""
        self._note(f"process {os.getpid()} watches the ranks of {self._host}; {self._limit()}")
        if self._first:
            self._files(self._exchange.clear)
        shared_memory.remove_stale()
        while not self.turn():
            system.wait_for_signal(WAKE, self._interval)

    def turn(self) -> bool:
        """Observe the ranks once and act on it; return whether no rank is left."""
        self._find()
        now = self._clock()
        self._look(now, min(now - self._last, 2 * self._interval))
        self._last = now
        if any(rank.inside for rank in self._ranks.values()):
            self._warn()
            self._consider()
            return False
        if len(self._ranks) < self._expected:
            if not shared_memory.is_unused(self._file):
                return False  # another rank begins
            self._path.unlink(missing_ok=True)
        if self._posted is not None:
            self._files(self._exchange.withdraw)
        return True

    def _find(self) -> None:
        """Add the ranks that have new parts; remove the file after the last rank."""
        if len(self._ranks) == self._expected:
            return
        for local_rank in sorted(set(range(self._expected)) - self._ranks.keys()):
            facts = shared_memory.read_facts(self._file, local_rank)
            if facts is not None:
                start = (local_rank + 1) * shared_memory.PART
                self._ranks[local_rank] = WatchedRank(
                    facts, self._host, self._file, start, self._limits
                )
        if len(self._ranks) == self._expected:
            self._path.unlink(missing_ok=True)

    def _look(self, now: float, elapsed: float) -> None:
        for rank in (one for one in self._ranks.values() if one.inside):
            rank.look(now, elapsed)
            if not rank.state and rank.phase != CLOSED:
                self._note(f"rank {rank.rank} is gone, process {rank.pid}, at {place(rank)}")

    def _warn(self) -> None:
        """Warn once if no process of this host uses a processor, though progress is expected."""
        inside = [rank for rank in self._ranks.values() if rank.inside]
        silence = min(rank.silence for rank in inside)
        stopped = any(rank.state in ("T", "t") for rank in inside)
        if silence < _SECONDS_SILENT or stopped or not any(rank.counts for rank in inside):
            self._unused, self._warned = None, False
            return
        if self._warned:
            return
        used = sum(evidence.processor_seconds(rank.pid) for rank in inside)
        since, before = self._unused or (silence, used)
        if used - before > evidence.POLLING * len(inside) * max(1.0, silence - since):
            since, before = silence, used
        elif silence - since >= _SECONDS_WITHOUT_PROCESSOR:
            self._warned = True
            write_stacks(inside)
            with contextlib.suppress(OSError):  # a rank has just ended
                self._print_warning(inside)
        self._unused = since, before

    def _print_warning(self, ranks: Sequence[WatchedRank]) -> None:
        """Print where the ranks of this host wait, unless one of them is debugged or compiles."""
        samples = [evidence.take(rank.pid, rank.stack()) for rank in ranks]
        if any(sample.takes_long for sample in samples):
            return
        lines = [
            f"  {describe(rank)}{f'; in {sample.frame}' if sample.frame else ''}\n"
            for rank, sample in zip(ranks, samples, strict=True)
        ]
        text = (
            f"hpctrain: warning: no process of the ranks on {self._host} has used a processor for "
            f"{_SECONDS_WITHOUT_PROCESSOR:.0f} s\n{''.join(lines)}"
            f"  the run goes on: it may wait for storage, another node or a person; {self._limit()}"
        )
        self._note(text)
        self._standard_error(lambda: _write_error(f"{text}\n"))

    def _consider(self) -> None:
        """Publish silence to the other helpers, and judge if it is too long."""
        counted = [rank for rank in self._ranks.values() if rank.counts]
        silence = max((rank.silence for rank in counted), default=0.0)
        limit = min((rank.limit for rank in counted), default=self._timeout)
        if silence < min(limit / 2, _SECONDS_SILENT):
            self._hung = None
            if self._posted is not None:
                self._posted = None
                self._files(self._exchange.withdraw)
            return
        judged = False
        if not self._alone():
            now = self._clock()
            # A short silence is normal, so the helpers of many hosts post less often.
            pause = min(limit / _LOOKS, max(1.0, len(self._hosts) / 16))
            if self._posted is None or now - self._posted > pause:
                self._posted = now
                self._files(partial(self._exchange.post, self._sightings()))
            judged = bool(self._files(self._exchange.judged))
        if judged or silence >= self._timeout:
            self._judge()
        elif self._first or self._alone():
            self._judge_early()

    def _judge_early(self) -> None:
        """End ranks that hang, or wait for each other at two places, before the time-out."""
        sightings, now = self._all_sightings(), self._clock()
        blame = (
            without_worker(sightings)
            or apart(sightings, self._world_size)
            or hung(sightings, self._world_size, self._hosts, _SECONDS_SILENT)
        )
        if blame is None:
            self._hung = None
        elif self._hung is None:
            self._hung = now, sightings
        elif now - self._hung[0] >= _SECONDS_SILENT and _longer(self._hung[1], sightings):
            self._end(blame, sightings)

    def _alone(self) -> bool:
        """Return whether this helper watches all ranks."""
        return len(self._ranks) >= self._world_size

    def _judge(self) -> None:
        if not self._alone():
            self._files(partial(self._exchange.post, self._sightings()))
        sightings = self._all_sightings()
        # The hosts of a suspended job do not continue at the same time, so wait one more look.
        before, self._suspended = self._suspended, suspended(sightings, self._world_size)
        if before or self._suspended:
            for rank in self._ranks.values():
                rank.silence = min(rank.silence, self._timeout / 2)
            return
        self._end(judge(sightings, self._world_size, self._hosts), sightings)

    def _end(self, blame: Blame, sightings: Sequence[Sighting]) -> None:
        """Publish and report the judgement, then kill the ranks."""
        error = blame.error(self._limit(blame))
        judgement, end = str(error), time.monotonic()
        if not self._alone():
            judgement = self._files(partial(self._exchange.settle, judgement)) or judgement
            end = time.monotonic() + _SECONDS_TO_AGREE
        for rank in (one.rank for one in self._ranks.values()):
            if rank in blame.ranks or not blame.ranks:
                self._files(partial(note_failure, rank, error, os.environ))
        try:
            self._report(judgement, sightings)
            time.sleep(max(0.0, end - time.monotonic()))
        finally:
            self._kill()

    def _report(self, judgement: str, sightings: Sequence[Sighting]) -> None:
        """Write the judgement to the log, standard error and the exit status file."""
        shown = f"hpctrain: error: {judgement}\n{self._show()}"
        # Stop the ranks, so that they print no follow-up errors, for example about lost ranks.
        self._send(signal.SIGSTOP)
        elsewhere = [one for one in sightings if one.host != self._host]
        self._note(shown + "\n".join(f"{one.host}: {describe(one)}" for one in elsewhere))
        reason = judgement.partition("\n")[0]
        for status_file in (rank.facts.exit_status_file for rank in self._ranks.values()):
            if status_file:
                self._files(partial(write_exit_status, status_file, exit_codes.FAILED, reason))
        text = f"{shown}This text is also in {self._log}\n"
        self._standard_error(lambda: _write_error(text))

    def _show(self) -> str:
        """Return the ranks of this host, their stacks, and the dumps of NCCL, on lines."""
        inside = [rank for rank in self._ranks.values() if rank.inside]
        write_stacks(inside)
        text = ""
        for rank in inside:
            stack = _NO_FRAME.sub("", rank.stack().rstrip())
            stack = stack or "no stack: the process did not respond"
            text += f"{describe(rank)}\n{textwrap.indent(stack, '  ')}\n"
        if dumps := self._files(partial(dump_collectives, inside)):
            text += f"collectives of NCCL, for torchfrtrace: {' '.join(dumps)}\n"
        return text

    def _kill(self) -> None:
        killed = self._send(signal.SIGKILL)
        for rank in killed:
            if rank.worker:  # it would keep files and standard error open
                with contextlib.suppress(OSError):
                    os.kill(rank.worker, signal.SIGKILL)
        end = time.monotonic() + _SECONDS_TO_DIE
        while any(rank.process_state() for rank in killed) and time.monotonic() < end:
            time.sleep(0.01)
        for rank in killed:
            if rank.process_state():
                self._note(f"rank {rank.rank}, process {rank.pid}, cannot be killed")
            rank.state = ""
        self._posted = None  # keep the posts for the helpers of other hosts

    def _send(self, number: int) -> list[WatchedRank]:
        """Send a signal to all ranks of this host that are in the run; return these ranks."""
        inside = [rank for rank in self._ranks.values() if rank.inside]
        for rank in inside:
            rank.send(number)
        return inside

    def _sightings(self) -> list[Sighting]:
        return [rank.sighting() for rank in self._ranks.values()]

    def _all_sightings(self) -> list[Sighting]:
        """Return the observations of the ranks of all hosts, as far as their helpers have any."""
        if self._alone():
            return self._sightings()
        return self._sightings() + (self._files(self._exchange.others) or [])

    def _limit(self, blame: Blame | None = None) -> str:
        if blame and blame.slowest is None and 0 < blame.limit < self._timeout:
            return (
                f"a process stopped for at most {self._limits.least:g} s (HPCTRAIN_LEAST_TIMEOUT)"
            )
        if blame is None or blame.slowest is None:
            return f"at most {self._timeout:g} s of silence (--timeout)"
        return (
            f"here at most {blame.limit:.0f} s of silence: adaptive timeout, {FACTOR} times the "
            f"recent max ({blame.slowest:.1f} s), min {self._limits.least:g} s "
            f"(HPCTRAIN_LEAST_TIMEOUT), max {self._timeout:g} s (--timeout)"
        )

    def _note(self, text: str) -> None:
        """Write a line to the log."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}"
        self._files(partial(_append, self._log, line))


def _longer(before: Sequence[Sighting], now: Sequence[Sighting]) -> bool:
    """Return whether all ranks are still silent at the same places; observations may be old."""
    earlier = {sighting.rank: sighting for sighting in before}
    pairs = [(earlier[one.rank], one) for one in now if one.rank in earlier]
    return all(one.position == then.position and one.silence > then.silence for then, one in pairs)


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rundir.append(path, line)


def _write_error(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
