"""Supervisor that starts the ranks, waits for them, and ends the others when one fails."""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.cluster import env_vars
from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import StartError, UsageError
from hpctrain.launch.end import End
from hpctrain.launch.rank_output import Output, announce
from hpctrain.launch.rank_processes import Connections, ForkServer, Imports, Rank
from hpctrain.launch.script_source import Source
from hpctrain.launch.stores import Stores
from hpctrain.process import failure_record, signals
from hpctrain.process.failure_record import Failure
from hpctrain.rundir.exit_status import read_exit_status

__all__ = [
    "EXIT_STATUS",
    "SECONDS_BETWEEN_CALLS",
    "SECONDS_OF_ONE_SIGNAL",
    "EndRequest",
    "Events",
    "new_server",
    "run",
    "signals_as_events",
    "with_files",
]

# A rank that lost another rank ends by itself within seconds, with a useful error.
_SECONDS_TO_FAIL = 5.0
_SECONDS_TO_STOP = 5.0
# A rank that a stop signal has ended saves nothing more with the others; those may save alone.
_SECONDS_AFTER_SIGNAL = 30.0
# PBS sends a signal to all processes of a job, and a parent such as timeout(1) sends it on.
SECONDS_OF_ONE_SIGNAL = 0.5
# A child process of a rank may hold the rank's output open after the rank has ended.
_SECONDS_TO_DRAIN = 1.0
# Longest wait for an event. The kernel may deliver a signal to another thread: Python then handles
# it only when the main thread wakes up.
SECONDS_BETWEEN_CALLS = 0.25

EXIT_STATUS = "exit-status"
_FRESH = "each rank imports its modules itself"

_FORWARDED = (signal.SIGINT, signal.SIGHUP, *signals.STOP)


class EndRequest(NamedTuple):
    """Request to end the ranks and their child processes by a signal.

    Attributes:
        number: number of the signal.
        seconds: time until SIGKILL follows; None for no limit.
    """

    number: int
    seconds: float | None = None


# A rank that has ended, a signal of this process, a request, or None when all output is forwarded.
Event = Rank | int | EndRequest | None
Events = queue.SimpleQueue[Event]


def run(
    command: Sequence[str],
    environs: Mapping[int, Mapping[str, str]],
    files: Path,
    labelled: bool,
    events: Events | None = None,
    cores: Sequence[Set[int]] | None = None,
    temporary: bool = True,
    folder: str | None = None,
    announces: bool = True,
    server: ForkServer | None = None,
    meanwhile: Callable[[], None] | None = None,
    failing: Callable[[], None] | None = None,
    stores: Stores | None = None,
    imports: Imports | None = None,
    fresh: bool = False,
    terminal: int | None = None,
    total: int = 0,
    host: str = "",
    source: Source | None = None,
) -> End:
    """Run a command once for each rank, until all ranks have ended.

    In the main thread, the first SIGINT, SIGHUP or signal of `signals.STOP` is forwarded to the
    ranks, without a time limit. A signal of another kind is forwarded too, because a scheduler may
    send one kind as a warning and another at the end. A later signal of the same kind ends the
    ranks at once. Child processes of the ranks end with them.

    Args:
        command: program and arguments.
        environs: environment of each rank, by rank.
        files: folder of this start only, which gets the exit status file and the failure records
            of the ranks.
        labelled: whether each line of output begins with the rank.
        events: queue of events; the number of a signal in it counts as a signal to this process.
        cores: cores of each rank, in the order of `environs`; None to bind no rank.
        temporary: whether this folder is removed if this process is killed.
        folder: working directory of the ranks (default: that of this process).
        announces: whether to print that a signal is forwarded.
        server: server that starts the ranks, and is swept at their end (default: a new one, which
            ends with them).
        meanwhile: function that is called each `SECONDS_BETWEEN_CALLS` while ranks run.
        failing: function that is called once when a rank has failed, and others still run.
        stores: sockets of the stores to serve.
        imports: what one process imports for all ranks; None for ranks that are new interpreters.
        fresh: whether no rank is forked from a warm server.
        terminal: number of the rank that has this process's terminal, and is a new interpreter.
            SIGINT is then left to it, as Ctrl-C reaches it.
        total: number of ranks of all hosts (default: of this one).
        host: name of this host, for the result.
        source: what the script says about its command; None for nothing.

    Raises:
        StartError: the system cannot start more processes.
    """
    if events is None:
        events = queue.SimpleQueue()
    ranks: list[Rank] = []
    output: Output | None = None
    with signals_as_events(events, terminal is not None):
        own_folder = files if temporary else None
        own = with_files(next(iter(environs.values())), files)
        keeps = server is not None
        if server is None:
            server = new_server(own_folder, stores, imports, terminal is not None, events)
        expected = source is not None and source.connects
        connections = Connections(len(environs), total or len(environs), expected)
        watch = _Watch(ranks, events, announces, meanwhile, failing, connections)
        try:
            for index, (number, environ) in enumerate(environs.items()):
                has_terminal = number == terminal
                ranks.append(
                    server.start(
                        number,
                        source.command(command, environ) if source else command,
                        with_files(environ, files, number),
                        cores[index] if cores else None,
                        folder,
                        terminal=has_terminal,
                        forks=server.warm and not (server.obstacle or has_terminal or fresh),
                    )
                )
            if server.obstacle:
                announce(f"{_FRESH}: {server.obstacle}")
            output = Output(
                ranks,
                labelled,
                lambda: events.put(None),
                partial(failure_record.shows, own),
            )
            watch.wait()
            watch.drain(_SECONDS_TO_DRAIN)
        finally:
            if ranks and server.was_killed:
                announce("the process that had started the ranks was killed, and they with it")
            for rank in ranks:
                rank.signal(signal.SIGKILL)
            if not keeps:
                server.end()
            elif not server.sweep():
                server.kill()
            for rank in ranks:
                rank.close(output=output is None)
            if output is not None:
                output.stop()
        watch.drain()
    watch.take_late_signal()
    return watch.end(own, total or len(ranks), host)


def new_server(
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


def with_files(environ: Mapping[str, str], folder: Path, rank: int = 0) -> dict[str, str]:
    """Return the environment of a rank with the paths of the files that it writes."""
    of_torch = {}
    if "TORCHELASTIC_RUN_ID" in environ:
        of_torch["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{rank}.json")
    return {
        **environ,
        **of_torch,
        env_vars.EXIT_STATUS_FILE: str(folder / EXIT_STATUS),
        env_vars.EVIDENCE: str(folder),
    }


@contextlib.contextmanager
def signals_as_events(events: "queue.SimpleQueue[Any]", terminal: bool) -> Iterator[None]:
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
    announces: bool
    meanwhile: Callable[[], None] | None
    failing: Callable[[], None] | None
    connections: Connections
    failed: list[Rank] = field(default_factory=list)
    signal: int | None = None
    forwarded: set[int] = field(default_factory=set)
    ended: bool = False
    drained: bool = False

    def end(self, own: Mapping[str, str], ranks: int, host: str) -> End:
        """Return how the ranks ended, after all of them have.

        Args:
            own: environment of a rank, with the paths of the files that it writes.
            ranks: number of ranks of all hosts.
            host: name of this host.
        """
        folder = Path(own[env_vars.EVIDENCE])
        failures = failure_record.failures(folder)
        # The end of a rank can take longer than this process waits for it.
        recorded = [rank for rank in self.ranks if rank.code and rank.number in failures]
        first = _first([*self.failed, *recorded], failures) if self.failed else None
        codes = [rank.code for rank in self.ranks if rank.code]
        end = End(
            code=self._code(first),
            ranks=ranks,
            signal=self.signal,
            stop_unhandled=first is None
            and self.signal in signals.STOP
            and bool(codes)
            and all(code in (-self.signal, 128 + self.signal) for code in codes),
            usage=all(rank.code == UsageError.exit_code for rank in self.ranks),
            opened=bool(failure_record.sessions(folder)),
            connected=self.connections.possible,
            fresh=failure_record.fresh(folder),
            recorded=read_exit_status(folder / EXIT_STATUS),
        )
        return end if first is None else self._with_first(end, first, failures, own, host)

    def _code(self, first: Rank | None) -> int:
        """Return the exit code of the first rank that failed, as in a shell; 0 on success."""
        if first is not None and first.code:
            return first.code if first.code > 0 else 128 - first.code
        if self.signal is not None and any(rank.code for rank in self.ranks):
            return 128 + self.signal
        # This process has ended them.
        return 128 + signal.SIGKILL if any(rank.code for rank in self.ranks) else 0

    def _with_first(
        self,
        end: End,
        first: Rank,
        failures: Mapping[int, Failure],
        own: Mapping[str, str],
        host: str,
    ) -> End:
        """Return an end with what is known of the first rank that failed."""
        failure = failures.get(first.number)
        failed = _time_of(first, failure)
        first.failure = failure
        code = end.code
        if failure is not None:
            if first not in self.failed:
                code = failure.exit_code
            # Of ranks with the same traceback, another one may have shown it.
            process = failure_record.shown(own)
            first.shown = any(
                failure_record.process(one.pid) == process and one.traceback == failure.traceback
                for one in failures.values()
            )
        caused = failure.caused_by_other_rank if failure else first.tail.caused_by_other_rank
        only = {rank.traceback for rank in self.ranks} <= {"", first.traceback}
        # os._exit(0) on one rank looks like success to the system.
        left = [one.number for one in self.ranks if one.code == 0 and one.ended < failed]
        before = (
            f", after the end of {ranks_text(left)} with exit code 0" if caused and left else ""
        )
        return replace(
            end,
            code=code,
            rank=first.number,
            host=host,
            time=time.time() - (time.monotonic() - failed),
            caused_by_other_rank=caused,
            brief=first.describe_end(brief=True, only=only, before=before),
            text=first.describe_end(),
            error=failure.error if failure else "",
        )

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
            if isinstance(event, EndRequest):
                self._end(event.number)
                if event.seconds is not None:
                    next_signals, deadline = iter(()), time.monotonic() + event.seconds
            elif isinstance(event, int):
                self._forward(event)
            elif isinstance(event, Rank):
                running.discard(event)
                self.connections.look(self.ranks)
                seconds = self._seconds_after(event)
                if seconds and deadline is None and running:
                    deadline = time.monotonic() + seconds
                if seconds == _SECONDS_TO_FAIL and self.failing is not None:
                    self.failing()
                    self.failing = None

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
        if self.signal is None:
            self.signal = number

    def _next(self, deadline: float | None) -> Event:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        event = self.events.get(timeout=timeout)
        self.drained = self.drained or event is None
        return event

    def _next_or_call(self) -> Event:
        """Return the next event; look for connections and call `meanwhile` until then."""
        called = time.monotonic()
        while True:
            seen = self.connections.seen
            pause = SECONDS_BETWEEN_CALLS if seen else self.connections.pause
            with contextlib.suppress(queue.Empty):
                return self._next(time.monotonic() + min(pause, SECONDS_BETWEEN_CALLS))
            self.connections.look(self.ranks)
            now = time.monotonic()
            if self.meanwhile is not None and now - called >= SECONDS_BETWEEN_CALLS:
                called = now
                self.meanwhile()

    def _reap(self, rank: Rank) -> None:
        rank.wait()
        self.events.put(rank)

    def _seconds_after(self, rank: Rank) -> float:
        """Return how long the other ranks may go on after the end of this one; 0 for no limit."""
        if not rank.code or self.ended:
            return 0.0
        if any(rank.code in (-number, 128 + number) for number in self.forwarded):
            return _SECONDS_AFTER_SIGNAL
        # It failed by itself, and not by a signal from this process.
        self.failed.append(rank)
        return _SECONDS_TO_FAIL

    def _forward(self, number: int) -> None:
        if number in self.forwarded:
            self._end(signal.SIGKILL)
            return
        self.forwarded.add(number)
        self.signal = number
        for rank in self.ranks:
            # Not to its child processes: it needs its loader workers while it saves.
            rank.signal(number, everything=False)
        if self.announces:
            name = signal.Signals(number).name
            announce(f"{name} is forwarded to the ranks; a second one ends them at once")

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
