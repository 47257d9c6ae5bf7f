"""Supervisor that starts the ranks, waits for them, and ends the others when one fails."""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cluster import env_vars
from hpctrain.errors import StartError, UsageError
from hpctrain.launch.rank_output import Output, announce
from hpctrain.launch.rank_processes import ForkServer, Imports, Rank, Started
from hpctrain.launch.stores import Stores
from hpctrain.process import failure_record, signals
from hpctrain.process.failure_record import Failure

__all__ = [
    "SECONDS_BETWEEN_CALLS",
    "SECONDS_OF_ONE_SIGNAL",
    "Events",
    "Outcome",
    "run",
    "with_files",
]

# A rank that lost another rank ends by itself within seconds, with a useful error.
_SECONDS_TO_FAIL = 5.0
_SECONDS_TO_STOP = 5.0
# PBS sends a signal to all processes of a job, and a parent such as timeout(1) sends it on.
SECONDS_OF_ONE_SIGNAL = 0.5
# A child process of a rank may hold the rank's output open after the rank has ended.
_SECONDS_TO_DRAIN = 1.0
# A lost host is found in such a call: with a longer time, the next attempt would begin later.
SECONDS_BETWEEN_CALLS = 0.25

_FRESH = "each rank imports its modules itself"

_FORWARDED = (signal.SIGINT, signal.SIGHUP, *signals.STOP)

# A rank that has ended, a signal of this process, or None when all output is forwarded.
Events = queue.SimpleQueue[Rank | int | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a start.

    Attributes:
        ranks: ranks of this machine, all of them ended.
        first: rank that failed first by itself; None if no rank failed.
        signal: signal that was forwarded to the ranks, or came after their end; None without one.
        failed: time at which that rank failed, in seconds of the monotonic clock.
    """

    ranks: Sequence[Rank]
    first: Rank | None
    signal: int | None
    failed: float = 0.0

    @property
    def stop_unhandled(self) -> bool:
        """Whether a stop signal ended ranks that did not handle it yet.

        A rank with a session handles it, so these ranks had not begun to train.
        """
        ends = [rank.code for rank in self.ranks if rank.code]
        return (
            self.first is None
            and self.signal in signals.STOP
            and bool(ends)
            and all(code in (-self.signal, 128 + self.signal) for code in ends)
        )

    @property
    def usage(self) -> bool:
        """Whether all ranks have ended with the exit code of wrong use."""
        return all(rank.code == UsageError.exit_code for rank in self.ranks)

    @property
    def code(self) -> int:
        """Exit code of the first rank that failed, as in a shell; 0 on success."""
        if self.first is not None and self.first.code:
            return self.first.code if self.first.code > 0 else 128 - self.first.code
        if self.signal is not None and any(rank.code for rank in self.ranks):
            return 128 + self.signal
        # This process has ended them.
        return 128 + signal.SIGKILL if any(rank.code for rank in self.ranks) else 0


def run(
    command: Sequence[str],
    environs: Mapping[int, Mapping[str, str]],
    exit_status_file: Path,
    labelled: bool,
    events: Events | None = None,
    cores: Sequence[Set[int]] | None = None,
    temporary: bool = True,
    forward: Callable[[int], str] | None = None,
    folder: str | None = None,
    announces: bool = True,
    started: Started | None = None,
    meanwhile: Callable[[], None] | None = None,
    stores: Stores | None = None,
    imports: Imports | None = None,
    terminal: int | None = None,
) -> Outcome:
    """Run a command once for each rank, until all ranks have ended.

    In the main thread, the first SIGINT, SIGHUP or signal of `signals.STOP` is forwarded to the
    ranks, without a time limit. A signal of another kind is forwarded too, because a scheduler may
    send one kind as a warning and another at the end. A later signal of the same kind ends the
    ranks at once. Child processes of the ranks end with them.

    Args:
        command: program and arguments.
        environs: environment of each rank, by rank.
        exit_status_file: path for $HPCTRAIN_EXIT_STATUS_FILE, in a folder of this start
            only, which also gets the failure records.
        labelled: whether each line of output begins with the rank.
        events: queue of events; the number of a signal in it counts as a signal to this process.
            SIGKILL ends the ranks at once.
        cores: cores of each rank, in the order of `environs`; None to bind no rank.
        temporary: whether the folder of the exit status file is removed if this process is killed.
        forward: function that is called for a first signal, in place of sending it to the ranks,
            and returns what it has done, for a message. A second one then ends the ranks by
            SIGTERM, and not by SIGKILL.
        folder: working directory of the ranks (default: that of this process).
        announces: whether to print that a signal is forwarded.
        started: the ranks and their server, if the processes are there already.
        meanwhile: function that is called each `SECONDS_BETWEEN_CALLS` while ranks run.
        stores: sockets of the stores to serve.
        imports: what one process imports for all ranks; None for ranks that are new interpreters.
        terminal: number of the rank that has this process's terminal, and is a new interpreter.
            SIGINT is then left to it, as Ctrl-C reaches it.

    Raises:
        StartError: the system cannot start more processes.
    """
    if events is None:
        events = queue.SimpleQueue()
    ranks: list[Rank] = []
    output: Output | None = None
    with _signals(events, terminal is not None):
        own_folder = exit_status_file.parent if temporary else None
        server = started.server if started else None
        if server is None:
            server = _server(own_folder, stores, imports, terminal is not None, events)
        watch = _Watch(ranks, events, forward, announces, meanwhile)
        try:
            for index, (number, environ) in enumerate(environs.items()):
                own = with_files(environ, exit_status_file)
                bound_to = cores[index] if cores else None
                if started:
                    ranks.append(started.ranks[index])
                else:
                    has_terminal = number == terminal
                    forks = server.warm and not (server.obstacle or has_terminal)
                    ranks.append(
                        server.start(
                            number,
                            command,
                            own,
                            bound_to,
                            folder,
                            terminal=has_terminal,
                            forks=forks,
                        )
                    )
            if server.obstacle:
                announce(f"{_FRESH}: {server.obstacle}")
            output = Output(
                ranks,
                labelled,
                lambda: events.put(None),
                partial(failure_record.shows, {env_vars.EVIDENCE: str(exit_status_file.parent)}),
            )
            watch.wait()
            watch.drain(_SECONDS_TO_DRAIN)
        finally:
            if ranks and server.was_killed:
                announce("the process that had started the ranks was killed, and they with it")
            for rank in ranks:
                rank.signal(signal.SIGKILL)
            server.end()
            for rank in ranks:
                rank.close(output=output is None)
            if output is not None:
                output.stop()
        watch.drain()
    watch.take_late_signal()
    return watch.outcome(exit_status_file.parent)


def _server(
    folder: Path | None,
    stores: Stores | None,
    imports: Imports | None,
    terminal: bool,
    events: Events,
) -> ForkServer:
    """Return a server that can start ranks, which has imported modules if there are any."""
    if imports is not None:
        server = ForkServer(folder, stores, imports, terminal)
        try:
            # The ranks get a signal that comes meanwhile.
            while events.empty():
                if server.is_ready(SECONDS_BETWEEN_CALLS):
                    return server
        except StartError as error:
            announce(f"{_FRESH}: {error.found}")
        server.kill()
    return ForkServer(folder, stores, terminal=terminal)


def with_files(environ: Mapping[str, str], exit_status_file: Path) -> dict[str, str]:
    """Return the environment of a rank with the paths of the files that it writes."""
    folder = str(exit_status_file.parent)
    return {
        **environ,
        env_vars.EXIT_STATUS_FILE: str(exit_status_file),
        env_vars.EVIDENCE: folder,
    }


@contextlib.contextmanager
def _signals(events: Events, terminal: bool) -> Iterator[None]:
    """Turn signals into events; other threads than the main thread cannot change handlers.

    Args:
        events: queue of events.
        terminal: whether a rank has the terminal, to which SIGINT is left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ignored signals stay ignored, for the ranks too, as after nohup or in a script's background.
    taken = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    times: dict[int, float] = {}

    def receive(caught: int, _: Any) -> None:
        now = time.monotonic()
        if now - times.get(caught, -SECONDS_OF_ONE_SIGNAL) >= SECONDS_OF_ONE_SIGNAL:
            times[caught] = now
            events.put(caught)

    handlers: dict[int, Any] = dict.fromkeys(taken, receive)
    if terminal and signal.SIGINT in handlers:
        handlers[signal.SIGINT] = lambda *_: None
    # If SIGCHLD is ignored, exit codes are lost.
    handlers[signal.SIGCHLD] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not set from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass
class _Watch:
    """State of a running start, and the handling of its events; its arguments are those of `run`.

    Attributes:
        failed: ranks that failed by themselves.
        signal: last forwarded signal, or one that came after the end of the ranks.
        forwarded: all forwarded signals.
        ended: whether this process has ended any rank.
        drained: whether all output has been forwarded.
    """

    ranks: Sequence[Rank]
    events: Events
    forward_by: Callable[[int], str] | None
    announces: bool
    meanwhile: Callable[[], None] | None
    failed: list[Rank] = field(default_factory=list)
    signal: int | None = None
    forwarded: set[int] = field(default_factory=set)
    ended: bool = False
    drained: bool = False

    def outcome(self, folder: Path) -> Outcome:
        """Return the outcome, after all ranks have ended.

        Args:
            folder: folder with the failure records of the ranks.
        """
        failures = failure_record.failures(folder)
        # The end of a rank can take longer than this process waits for it.
        recorded = [rank for rank in self.ranks if rank.code and rank.number in failures]
        first = _first([*self.failed, *recorded], failures) if self.failed else None
        failed = 0.0
        if first is not None:
            failed = _time_of(first, failures.get(first.number))
            first.failure = failures.get(first.number)
            if first.failure is not None and first not in self.failed:
                first.code = first.failure.exit_code
            # Of ranks with the same traceback, another one may have shown it.
            shown = failure_record.shown(folder)
            first.shown = first.failure is not None and any(
                failure.pid == shown and failure.traceback == first.failure.traceback
                for failure in failures.values()
            )
        return Outcome(self.ranks, first, self.signal, failed)

    def wait(self) -> None:
        """Wait until all ranks have ended."""
        for rank in self.ranks:
            threading.Thread(target=self._reap, args=(rank,), daemon=True).start()
        running = set(self.ranks)
        deadline: float | None = None
        next_signals = iter((signal.SIGTERM,))
        while running:
            try:
                event = self._next(deadline) if deadline else self._next_or_call()
            except queue.Empty:
                self._end(next(next_signals, signal.SIGKILL))
                deadline = time.monotonic() + _SECONDS_TO_STOP
                continue
            if isinstance(event, int):
                self._forward(event)
            elif event is not None:
                running.discard(event)
                if self._has_failed(event) and deadline is None:
                    deadline = time.monotonic() + _SECONDS_TO_FAIL

    def drain(self, seconds: float = float("inf")) -> None:
        """Wait until all output is forwarded, or a signal is received, or the time is over."""
        deadline = time.monotonic() + seconds
        while not self.drained:
            try:
                event = self._next(None if seconds == float("inf") else deadline)
            except queue.Empty:
                return
            if isinstance(event, int):
                self._note_late(event)
                return

    def take_late_signal(self) -> None:
        """Take a signal that came after the end of the ranks, if there is one.

        A scheduler signals all processes of a job at once, so the ranks may end before the signal
        to this process arrives here.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                event = self.events.get_nowait()
                if isinstance(event, int):
                    self._note_late(event)

    def _note_late(self, number: int) -> None:
        if self.signal is None and number != signal.SIGKILL:
            self.signal = number

    def _next(self, deadline: float | None) -> Rank | int | None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        event = self.events.get(timeout=timeout)
        self.drained = self.drained or event is None
        return event

    def _next_or_call(self) -> Rank | int | None:
        """Return the next event; call `meanwhile` until then."""
        while self.meanwhile is not None:
            with contextlib.suppress(queue.Empty):
                return self._next(time.monotonic() + SECONDS_BETWEEN_CALLS)
            self.meanwhile()
        return self._next(None)

    def _reap(self, rank: Rank) -> None:
        rank.wait()
        self.events.put(rank)

    def _has_failed(self, rank: Rank) -> bool:
        """Return whether a rank failed by itself, and not by a signal from this process."""
        if not rank.code or self.ended:
            return False
        if any(rank.code in (-number, 128 + number) for number in self.forwarded):
            return False
        self.failed.append(rank)
        return True

    def _forward(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._end(number)
            return
        if number in self.forwarded:
            self._end(signal.SIGTERM if self.forward_by else signal.SIGKILL)
            return
        self.forwarded.add(number)
        self.signal = number
        done = "is forwarded to the ranks"
        if self.forward_by is not None:
            done = self.forward_by(number)
        else:
            for rank in self.ranks:
                # Not to its child processes: it needs its loader workers while it saves.
                rank.signal(number, everything=False)
        if self.announces:
            announce(f"{signal.Signals(number).name} {done}; a second one ends them at once")

    def _end(self, number: int) -> None:
        self.ended = True
        for rank in self.ranks:
            if rank.code is None:
                rank.signal(number)


def _first(failed: Sequence[Rank], failures: Mapping[int, Failure]) -> Rank | None:
    """Return the rank that failed first.

    A failure record has the time, and whether another rank was the cause. A killed rank has no
    record. Its time is that of its end or of its first error line, because ending can take long. A
    rank that a library aborted because of another rank did not fail by itself.

    Args:
        failed: ranks that failed.
        failures: failure records, by rank.
    """

    def order(rank: Rank) -> tuple[bool, float, int]:
        failure = failures.get(rank.number)
        caused = failure.caused_by_other_rank if failure else rank.tail.caused_by_other_rank
        return caused, _time_of(rank, failure), rank.number

    return min(failed, key=order, default=None)


def _time_of(rank: Rank, failure: Failure | None) -> float:
    return failure.time if failure else min(rank.tail.failed, rank.ended)
