"""Main loop of a helper: observe the ranks, judge, show their stacks, kill them."""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain import rundir
from hpctrain.errors import HpctrainError
from hpctrain.monitoring.watchdog import slots, stacks
from hpctrain.monitoring.watchdog.blame import Blame, Sighting, apart, judge, place, suspended
from hpctrain.monitoring.watchdog.exchange import Aside, HelperExchange, append
from hpctrain.monitoring.watchdog.processes import STATES, Process
from hpctrain.process.phases import CLOSED, IDLE

__all__ = ["Watch"]

_LOOKS = 20  # looks per time-out
_MOST_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_FOR_FILES = 5.0  # the helper continues without a slower file system
# Time for the helpers of other hosts to find the judgement and end their ranks at the same time.
_SECONDS_TO_AGREE = 3.0
_SECONDS_TO_DIE = 10.0
# Silence after which ranks that wait at two places are noticed; they end after as long again.
_SECONDS_APART = 5.0


@dataclass(slots=True)
class _Watched:
    """A rank of this host."""

    facts: slots.Facts
    slot: int
    stack: int
    process: Process
    state: str = "R"
    step: int = 0
    phase: int = IDLE
    heartbeat: int = 0
    silence: float = 0.0

    def look(self, now: float, elapsed: float) -> None:
        """Update the observation, `elapsed` seconds after the previous one."""
        before, last = self.state, self.heartbeat
        self.step, self.phase, self.heartbeat = slots.PLACE.unpack(
            os.pread(self.slot, slots.PLACE.size, 0)
        )
        self.state = self.process.state()
        # Count only time in which this process was running: the whole job may be suspended.
        if self.heartbeat != last:
            self.silence = min(elapsed, max(0.0, now - self.heartbeat / 1e9))
        else:
            self.silence += elapsed
        if before == "T" != self.state:
            self.silence = 0.0

    @property
    def inside(self) -> bool:
        """Whether the rank is alive and has not left the run."""
        return bool(self.state) and self.phase != CLOSED

    @property
    def counts(self) -> bool:
        """Whether the silence of the rank counts."""
        return self.inside and self.phase != IDLE


class Watch:
    """The helper of a host, which watches its ranks.

    Args:
        folder: folder with the slots of the ranks.
        clock: function that returns seconds, like `time.monotonic`; tests replace it.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        settings = slots.read_settings(folder)
        self._host, self._hosts = settings["host"], settings["hosts"]
        self._world_size: int = settings["world_size"]
        self._timeout: float = settings["timeout"]
        self._directory = rundir.RunDirectory(settings["directory"])
        self._log = self._directory.logs / f"watch-{self._host}.log"
        self._exchange = HelperExchange(
            self._directory.path, settings["key"], self._host, settings["rank"]
        )
        self._first = settings["node_rank"] == 0
        self._apart: tuple[float, list[Sighting]] | None = None  # when and how first observed
        self._interval = min(_MOST_SECONDS_BETWEEN_LOOKS, self._timeout / _LOOKS)
        self._bell = os.open(folder / "bell", os.O_RDWR | os.O_NONBLOCK)
        self._expected: int | None = settings["local_world_size"]
        self._ranks: dict[str, _Watched] = {}
        self._posted: float | None = None  # when silence was last published
        self._last = clock()  # time of the last look at the ranks
        self._suspended = False  # whether all ranks of the run were stopped
        self._files, self._voice = Aside(), Aside()

    def run(self) -> None:
        """Watch until no rank is left."""
        self._note(f"process {os.getpid()} watches the ranks of {self._host}; {self._limit()}")
        if self._first:
            self._files(self._exchange.clear, _SECONDS_FOR_FILES)
        slots.remove_stale()
        while not self.turn():
            self._sleep()

    def turn(self) -> bool:
        """Observe the ranks once and act on it; return whether no rank is left."""
        self._find()
        now = self._clock()
        self._look(now, min(now - self._last, 2 * self._interval))
        self._last = now
        if not any(one.inside for one in self._ranks.values()):
            return self._leave()
        self._consider()
        return False

    def _sleep(self) -> None:
        """Wait until the next look, or until a rank ends or leaves."""
        ends = [one.process.handle for one in self._ranks.values() if one.inside]
        ready, _, _ = select.select(
            [self._bell, *(handle for handle in ends if handle is not None)],
            [],
            [],
            self._interval,
        )
        if self._bell in ready:
            os.read(self._bell, 1 << 16)

    def _find(self) -> None:
        """Add the ranks that have new slots; remove the folder after the last one."""
        if len(self._ranks) == self._expected:
            return
        for path in slots.paths(self._folder):
            if path.name not in self._ranks:
                facts, slot, stack = slots.read(path)
                process = Process(facts.pid, facts.started)
                self._ranks[path.name] = _Watched(facts, slot, stack, process)
        if len(self._ranks) == self._expected:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _look(self, now: float, elapsed: float) -> None:
        for one in self._ranks.values():
            lived = one.inside
            if lived:
                one.look(now, elapsed)
            if lived and not one.state and one.phase != CLOSED:
                self._note(
                    f"rank {one.facts.rank} is gone, process {one.facts.pid}, at "
                    f"{place(self._sighting(one))}"
                )

    def _leave(self) -> bool:
        """Remove the remaining files; return False if another rank has a new slot."""
        if len(self._ranks) != self._expected:
            for name in self._ranks:
                for path in (self._folder / name, self._folder / f"{name}.stack"):
                    path.unlink(missing_ok=True)
            if slots.paths(self._folder):
                self._ranks.clear()
                return False
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._posted is not None:
            self._files(self._exchange.withdraw, _SECONDS_FOR_FILES)
        return True

    def _consider(self) -> None:
        """Publish silence to the other helpers, and judge if it is too long."""
        silence = max((one.silence for one in self._ranks.values() if one.counts), default=0.0)
        if silence >= _SECONDS_APART:
            self._look_apart()
        else:
            self._apart = None
        if silence < min(self._timeout / 2, _SECONDS_APART):
            if self._posted is not None:
                self._posted = None
                self._files(self._exchange.withdraw, _SECONDS_FOR_FILES)
            return
        judged = False
        if not self._alone():
            now = self._clock()
            if self._posted is None or now - self._posted > self._seconds_between_posts(silence):
                self._posted = now
                self._post()
            judged = bool(self._files(self._exchange.judged, _SECONDS_FOR_FILES))
        if judged or silence >= self._timeout:
            self._judge()

    def _seconds_between_posts(self, silence: float) -> float:
        """Return the seconds between posts; a short silence is normal, so large jobs post less."""
        if silence >= self._timeout / 2:
            return self._timeout / _LOOKS
        return min(self._timeout / _LOOKS, max(1.0, len(self._hosts) / 16))

    def _look_apart(self) -> None:
        """End ranks that wait for each other at two places; the first helper checks all ranks."""
        if not (self._first or self._alone()):
            return
        seen = self._sightings()
        if not self._alone():
            seen += self._files(self._exchange.others, _SECONDS_FOR_FILES) or []
        blame, now = apart(seen, self._world_size), self._clock()
        if blame is None:
            self._apart = None
        elif self._apart is None:
            self._apart = now, seen
        elif now - self._apart[0] >= _SECONDS_APART and _longer(self._apart[1], seen):
            self._end(blame, seen)

    def _alone(self) -> bool:
        """Return whether this helper watches all ranks."""
        return len(self._ranks) >= self._world_size

    def _post(self) -> None:
        own = self._sightings()
        self._files(lambda: self._exchange.post(own), _SECONDS_FOR_FILES)

    def _judge(self) -> None:
        seen = self._sightings()
        if not self._alone():
            self._post()
            seen += self._files(self._exchange.others, _SECONDS_FOR_FILES) or []
        # The hosts of a suspended job do not continue at the same time, so wait one more look.
        before, self._suspended = self._suspended, suspended(seen, self._world_size)
        if before or self._suspended:
            for one in self._ranks.values():
                one.silence = min(one.silence, self._timeout / 2)
            return
        self._end(judge(seen, self._world_size, self._hosts), seen)

    def _end(self, blame: Blame, seen: Sequence[Sighting]) -> None:
        """Publish and report the judgement, then kill the ranks."""
        expected = f"a sign of life from every rank; {self._limit()}"
        judgement = str(HpctrainError(blame.code, blame.found, expected, *blame.fixes))
        if not self._alone():
            mine = judgement
            judgement = (
                self._files(lambda: self._exchange.settle(mine), _SECONDS_FOR_FILES) or judgement
            )
        end = time.monotonic() + (0.0 if self._alone() else _SECONDS_TO_AGREE)
        try:
            self._tell(judgement, seen)
            time.sleep(max(0.0, end - time.monotonic()))
        finally:
            self._kill()

    def _tell(self, judgement: str, seen: Sequence[Sighting]) -> None:
        """Write the judgement to the log, standard error and the exit status file."""
        error = f"hpctrain: error: {judgement}\n"
        shown = self._show()
        # Stop the ranks, so that they print no follow-up errors, for example about lost ranks.
        self._send(signal.SIGSTOP)
        elsewhere = [one for one in seen if one.host != self._host]
        lines = [f"{one.host}: {_describe(one)}\n" for one in elsewhere]
        self._note("".join([error, *shown, *lines]).rstrip())
        told = [
            one.facts.exit_status_file for one in self._ranks.values() if one.facts.exit_status_file
        ]
        if told:
            reason = judgement.partition("\n")[0]
            self._files(
                lambda: rundir.write_exit_status(told[0], rundir.FAILED, reason), _SECONDS_FOR_FILES
            )
        self._voice(
            lambda: _say("".join([error, *shown, f"This is kept in {self._log}\n"])),
            _SECONDS_FOR_FILES,
        )

    def _show(self) -> list[str]:
        """Return lines with the ranks of this host and their stacks."""
        seen = [one for one in self._ranks.values() if one.inside]
        found = stacks.collect({one.stack: one.process for one in seen})
        lines = []
        for one in seen:
            stack = found[one.stack] or "no stack: it did not answer\n"
            lines.append(f"{_describe(self._sighting(one))}\n")
            lines += [f"  {line}\n" if line else "\n" for line in stack.splitlines()]
        return lines

    def _kill(self) -> None:
        victims = self._send(signal.SIGKILL)
        end = time.monotonic() + _SECONDS_TO_DIE
        while any(one.process.state() for one in victims) and time.monotonic() < end:
            time.sleep(0.01)
        for one in victims:
            if one.process.state():
                self._note(f"rank {one.facts.rank}, process {one.facts.pid}, cannot be killed")
            one.state = ""
        self._posted = None  # keep the posts for the helpers of other hosts

    def _send(self, number: int) -> list[_Watched]:
        """Send a signal to all ranks of this host that are in the run; return these ranks."""
        inside = [one for one in self._ranks.values() if one.inside]
        for one in inside:
            one.process.send(number)
        return inside

    def _sightings(self) -> list[Sighting]:
        return [self._sighting(one) for one in self._ranks.values()]

    def _sighting(self, one: _Watched) -> Sighting:
        waits_in = one.process.waits_in() if one.state == "D" else ""
        facts = one.facts
        return Sighting(
            facts.rank,
            self._host,
            one.step,
            one.phase,
            one.silence,
            facts.pid,
            one.state,
            waits_in,
        )

    def _limit(self) -> str:
        return f"at most {self._timeout:g} s of silence (--timeout)"

    def _note(self, text: str) -> None:
        """Write a line to the log."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        self._files(lambda: append(self._log, line), _SECONDS_FOR_FILES)


def _longer(before: Sequence[Sighting], now: Sequence[Sighting]) -> bool:
    """Return whether all ranks are still silent at the same places; observations may be old."""
    were = {one.rank: one for one in before}
    return all(
        (were[one.rank].step, were[one.rank].phase) == (one.step, one.phase)
        and one.silence > were[one.rank].silence
        for one in now
        if one.rank in were
    )


def _describe(one: Sighting) -> str:
    state = STATES.get(one.state, one.state)
    how = f"process {one.pid} {state} (state {one.state})" if one.state else "its process has ended"
    return f"rank {one.rank}: silent for {one.silence:.0f} s at {place(one)}; {how}"


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
