"""Starts the ranks, waits for them, and ends the others when one fails."""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster import env_vars
from hpctrain.launch.rank_output import Output, say
from hpctrain.launch.ranks import Guard, Rank
from hpctrain.process import failure_record, signals
from hpctrain.process.failure_record import Failure

__all__ = ["Events", "Outcome", "run"]

# A rank that lost another one ends by itself within seconds, with an error worth reading.
_SECONDS_TO_FAIL = 5.0
_SECONDS_TO_STOP = 5.0
# What a rank started may hold its output open when the rank has ended.
_SECONDS_TO_SPEAK = 1.0

_PASSED_ON = (signal.SIGINT, signal.SIGHUP, *signals.STOP)

# A rank that has ended, a signal that came, or None: all output is passed on.
Events = queue.SimpleQueue[Rank | int | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start ended.

    Attributes:
        ranks: of this machine, all of them ended.
        first: the one that failed first by itself; None when none did.
        signal: that came and was passed on to the ranks; None when none did.
        sessions: whether any rank has opened a session.
    """

    ranks: Sequence[Rank]
    first: Rank | None
    signal: int | None
    sessions: bool = True

    @property
    def unheard(self) -> bool:
        """Whether a signal that asks to stop ended ranks that did not know it yet.

        A rank that has a session handles it, so nothing was begun.
        """
        ends = [rank.code for rank in self.ranks if rank.code]
        return (
            self.first is None
            and self.signal in signals.STOP
            and bool(ends)
            and all(code in (-self.signal, 128 + self.signal) for code in ends)
        )

    @property
    def code(self) -> int:
        """Of the first rank that failed, as a shell has it; 0 when all went well."""
        if self.first is not None and self.first.code:
            return self.first.code if self.first.code > 0 else 128 - self.first.code
        if self.signal is not None and any(rank.code for rank in self.ranks):
            return 128 + self.signal
        return 0


def run(
    command: Sequence[str],
    environs: Mapping[int, Mapping[str, str]],
    verdict: Path,
    labelled: bool,
    bind: bool = True,
    orders: Events | None = None,
) -> Outcome:
    """Run a command once for each rank, to the end of all.

    In the main thread the first SIGINT, SIGHUP or signal of `signals.STOP` goes to the ranks, which
    may take their time; another one ends them at once, unless it is the first of its kind: a
    scheduler may send one when it warns and another when it means it. Whatever the ranks started
    ends with them.

    Args:
        command: program and arguments.
        environs: the environment of each rank, by rank.
        verdict: the file that $HPCTRAIN_VERDICT is to name, in a folder of this start's own.
        labelled: whether each line of output gets the rank in front.
        bind: let the system end a rank with this thread; False where other threads run.
        orders: a signal's number that is put there counts as a signal that came.

    Raises:
        StartError: the system lets no more processes start.
    """
    events: Events = queue.SimpleQueue() if orders is None else orders
    ranks: list[Rank] = []
    output: Output | None = None
    with _signals(events):
        guard = Guard(verdict)
        watch = _Watch(ranks, events)
        try:
            for number, environ in environs.items():
                own = {
                    **environ,
                    env_vars.VERDICT: str(verdict),
                    env_vars.EVIDENCE: str(verdict.parent),
                }
                ranks.append(Rank.start(number, command, own, bind))
                guard.know(ranks[-1])
            output = Output(ranks, labelled, lambda: events.put(None))
            watch.wait()
            watch.listen(_SECONDS_TO_SPEAK)
        finally:
            for rank in ranks:
                rank.signal(signal.SIGKILL)
            guard.end()
            for rank in ranks:
                rank.reap(close=output is None)
            if output is not None:
                output.stop()
        watch.listen()
    return watch.outcome(verdict.parent)


@contextlib.contextmanager
def _signals(events: Events) -> Iterator[None]:
    """Let signals come as events. Only the main thread can: elsewhere they stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays so, for the ranks too: nohup, and the background of a shell's script.
    taken = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    handlers: dict[int, Any] = dict.fromkeys(taken, lambda caught, _: events.put(caught))
    # Where this one is ignored, no exit code is ever known.
    handlers[signal.SIGCHLD] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not set from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Watch:
    """What has happened so far, and what follows from it."""

    def __init__(self, ranks: Sequence[Rank], events: Events) -> None:
        self._ranks = ranks
        self._events = events
        self._failed: list[Rank] = []
        self._signal: int | None = None  # the last that was passed on
        self._passed_on: set[int] = set()
        self._ended = False  # whether anything was ended from here
        self._silent = False  # whether all output has been passed on

    def outcome(self, folder: Path) -> Outcome:
        """When all is over.

        Args:
            folder: where ranks left how they failed.
        """
        failures = failure_record.failures(folder)
        first = _first(self._failed, failures)
        if first is not None:
            first.failure = failures.get(first.number)
            first.shown = first.failure is not None and first.failure.pid == failure_record.shown(
                folder
            )
        return Outcome(self._ranks, first, self._signal, failure_record.sessions(folder))

    def wait(self) -> None:
        """Until all ranks have ended."""
        for rank in self._ranks:
            threading.Thread(target=self._reap, args=(rank,), daemon=True).start()
        running = set(self._ranks)
        deadline: float | None = None
        orders = iter((signal.SIGTERM,))
        while running:
            try:
                event = self._next(deadline)
            except queue.Empty:
                self._end(next(orders, signal.SIGKILL))
                deadline = time.monotonic() + _SECONDS_TO_STOP
                continue
            if isinstance(event, int):
                self._pass_on(event)
            elif event is not None:
                running.discard(event)
                if self._has_failed(event) and deadline is None:
                    deadline = time.monotonic() + _SECONDS_TO_FAIL

    def listen(self, seconds: float = float("inf")) -> None:
        """Until all output has been passed on, or somebody will not wait, or for so long."""
        deadline = time.monotonic() + seconds
        while not self._silent:
            try:
                if isinstance(self._next(None if seconds == float("inf") else deadline), int):
                    return
            except queue.Empty:
                return

    def _next(self, deadline: float | None) -> Rank | int | None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        event = self._events.get(timeout=timeout)
        self._silent = self._silent or event is None
        return event

    def _reap(self, rank: Rank) -> None:
        rank.wait()
        self._events.put(rank)

    def _has_failed(self, rank: Rank) -> bool:
        """Whether a rank failed by itself, and not by a signal that came from here."""
        if not rank.code or self._ended:
            return False
        if any(rank.code in (-number, 128 + number) for number in self._passed_on):
            return False
        self._failed.append(rank)
        return True

    def _pass_on(self, number: int) -> None:
        if number in self._passed_on:
            self._end(signal.SIGKILL)
            return
        self._passed_on.add(number)
        self._signal = number
        say(
            f"hpctrain: {signal.Signals(number).name} is passed on to the ranks; another one ends "
            "them at once\n"
        )
        for rank in self._ranks:
            # Not to what it started: loader workers would be gone while it saves.
            rank.signal(number, everything=False)

    def _end(self, number: int) -> None:
        self._ended = True
        for rank in self._ranks:
            if rank.code is None:
                rank.signal(number)


def _first(failed: Sequence[Rank], left: Mapping[int, Failure]) -> Rank | None:
    """The rank that failed first.

    What a rank has left says when, and whether another one was the cause. One that was killed has
    left nothing: it counts from its end, or from the moment at which it began to say something,
    as leaving can take long. One that was aborted by its library, for want of another one, is none
    that failed by itself.

    Args:
        failed: ranks that did not end well.
        left: by rank, what it has left.
    """

    def order(rank: Rank) -> tuple[bool, float, int]:
        failure = left.get(rank.number)
        if failure is not None:
            return failure.follows, failure.time, rank.number
        return rank.tail.follows, min(rank.tail.failed, rank.ended), rank.number

    return min(failed, key=order, default=None)
