"""The liveness of the ranks: which are gone, have failed, or keep the others waiting.

Horovod reports to the ranks that something failed, to some of them late, and without the cause. Its
stall inspector finds no missing rank over gloo. So each rank keeps a connection to rank 0, on the
socket that the rendezvous bound, and one thread watches it. The connection of a killed rank ends. A
rank that fails, or has waited too long for the others, reports that. Rank 0 then asks all ranks
that wait, and finds the cause: ranks that are gone or have failed, else those that do not wait for
the others. At its answer every rank cuts Horovod's connections, or it would wait for gloo's
time-out. The thread of rank 0 serves Horovod's store as well.

    rank → rank 0   ["rank", RANK]            the first message
    rank 0 → rank   ["port", PORT]            all ranks are there; port of Horovod's store
    rank 0 → rank   ["missing", RANKS]        some ranks did not come in time
    rank → rank 0   ["end", REASON, WAIT]     what failed there, and what the rank waits for
    rank 0 → rank   ["report"]                a rank that waits for others sends "end"
    rank 0 → rank   ["cause", FINDINGS]       the rank then closes its connection
    rank → rank 0   ["left"]                  the rank leaves normally
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpctrain.backends.barrier import host_of, missing_error, named
from hpctrain.backends.settings import BackendSettings
from hpctrain.errors import HpctrainError, RankLostError
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.http_store import HttpStore
from hpctrain.rendezvous.messages import GRACE_SECONDS, keep_alive

__all__ = ["SHOWN", "Findings", "Lines", "Liveness", "Member", "Wait", "end"]

SHOWN = 8  # maximum number of failed or waiting ranks in a message
_LONGEST_LINE = 1 << 20
_TICK_SECONDS = 0.1
_PATIENCE_SECONDS = 8.0  # for rank 0 to find the cause
_SHUTDOWN_SECONDS = 1.0  # for Horovod's ranks to end together, if all of them can


class Wait:
    """The wait of the main thread for the other ranks: `with wait("gradients"): …`.

    Attributes:
        since: time when the wait began; None if the main thread does not wait.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._what = ""

    def __call__(self, what: str) -> "Wait":
        """Set what the next wait is for."""
        self._what = what
        return self

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.since = None

    def __str__(self) -> str:
        return self._what if self.since is not None else ""


@dataclass(frozen=True, slots=True)
class Findings:
    """The cause of a failure, as rank 0 has found it.

    Attributes:
        lost: ranks whose process is gone.
        unresponsive: ranks that keep the others waiting.
        failed: pairs of a rank and what failed there.
        waits: pairs of a rank and what it waits for, if nothing else is known.
    """

    lost: list[int] = field(default_factory=list)
    unresponsive: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    waits: list[tuple[int, str]] = field(default_factory=list)


class Lines:
    """A connection that carries messages, each a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        keep_alive(connection)
        self.connection = connection
        self.rank = -1  # unknown so far
        self._rest = b""

    def send(self, *message: Any) -> None:
        """Send a message; `read` notices the end of the connection."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Any] | None:
        """Return the messages that have arrived; None at the end of the connection."""
        try:
            data = self.connection.recv(1 << 16)
            *lines, self._rest = (self._rest + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError):  # its host is lost, or an unknown peer
            return None
        return messages if data and len(self._rest) < _LONGEST_LINE else None


def end(connection: socket.socket) -> None:
    """End a connection, also where a forked process has inherited it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Liveness(ABC):
    """The part of this rank in the search for lost ranks.

    Args:
        rendezvous: all ranks, with their hosts and addresses.
        settings: time-outs of the start and of a wait.
        wait: wait of the main thread for the other ranks.
        cut: function that ends every such wait with an error.
        store: Horovod's store, on rank 0.

    Raises:
        RankMissingError: rank 0 is gone.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        settings: BackendSettings,
        wait: Wait,
        cut: Callable[[], None],
        store: HttpStore | None,
    ) -> None:
        self._rendezvous, self._settings = rendezvous, settings
        self._wait, self._cut, self._store = wait, cut, store
        self._rank = rendezvous.world.rank
        self._port = 0
        self._missing: list[int] = []
        self._found: Findings | None = None
        self._assembled, self._known = threading.Event(), threading.Event()
        self._told_at: float | None = None  # when this rank reported a failure or a long wait
        self._cut_at: float | None = None
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._watch, name="horovod liveness", daemon=True)
        self._open()
        self._thread.start()

    @property
    def known(self) -> bool:
        """Whether the cause of a failure is known, or rank 0 is gone."""
        return self._known.is_set()

    def assemble(self) -> int:
        """Wait until all ranks have called this; return the port of Horovod's store.

        Raises:
            RankMissingError: names the ranks that did not come in time.
            RankLostError: a rank was lost or failed meanwhile.
        """
        # Rank 0 needs a moment to tell the others who is missing.
        if not self._assembled.wait(self._settings.start_timeout + GRACE_SECONDS):
            self._missing = [0]
        found = self._found or Findings()
        if missing := self._missing or found.lost:
            raise missing_error(self._rendezvous, missing, self._settings.start_timeout)
        if error := self._error(found):
            raise error
        return self._port

    def report(self, reason: str = "") -> None:
        """Report what failed on this rank; nothing if it only waits for others."""
        self._told_at = time.monotonic()
        self._tell(reason[:1000], str(self._wait))

    def find_error(self) -> HpctrainError | None:
        """Return an error about lost or failed ranks, or None if all of them are there."""
        if not self.known:
            self.report()
            self._known.wait(_PATIENCE_SECONDS + 1.0)
        return self._error(self._found or Findings(unresponsive=[0]))

    def leave(self, normally: bool) -> None:
        """End the presence of this rank. Rank 0, which informs the others, leaves last.

        Args:
            normally: whether all ranks leave normally, without a failure.
        """
        del normally
        self._closing = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                end(key.fileobj)
        self._selector.close()

    @abstractmethod
    def _open(self) -> None:
        """Begin to watch the sockets of this rank."""

    @abstractmethod
    def _tell(self, reason: str, wait: str) -> None:
        """Give the report of this rank to rank 0."""

    @abstractmethod
    def _done(self) -> bool:
        """Return whether the thread of this rank may end."""

    def _watch(self) -> None:
        """Handle messages and time limits, in the thread."""
        while not self._done():
            for key, _ in self._selector.select(_TICK_SECONDS):
                key.data()
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        since = self._wait.since
        if since is not None and now - since > self._settings.timeout:
            self._report_wait()
        if self._cut_at is not None and now >= self._cut_at:
            self._cut_at = None
            self._cut()

    def _report_wait(self) -> None:
        if self._wait.since is not None and self._told_at is None:
            self.report()

    def _end_waits(self, found: Findings) -> None:
        """Take over the findings, and end all waits.

        A rank that is cut off while Horovod shuts down waits until gloo's time-out. So after a
        failure that was reported, Horovod has time to shut down.
        """
        self._found = found
        self._cut_at = time.monotonic() + (_SHUTDOWN_SECONDS if found.failed else 0.0)
        self._known.set()
        self._assembled.set()

    def _error(self, found: Findings) -> HpctrainError | None:
        rendezvous = self._rendezvous
        parts = [
            f"rank {rank} on {host_of(rendezvous, rank)} failed: {reason}"
            for rank, reason in found.failed
            if rank != self._rank
        ]
        if found.lost:
            parts.append(f"{named(rendezvous, found.lost)}: the process is gone")
        if self._rank in found.unresponsive:
            parts.append("the other ranks waited for this rank, which did not answer in time")
        elif found.unresponsive:
            parts.append(f"{named(rendezvous, found.unresponsive)}: no answer")
        if len(set(dict(found.waits).values())) > 1:
            parts += [f"rank {rank} waits for {what}" for rank, what in found.waits[:SHOWN]]
        if not parts:
            return None
        return RankLostError(
            "HT309",
            "; ".join(parts),
            "all ranks until the end of the run",
            "look for the first error in the log of that rank, and whether its host is up",
        )


class Member(Liveness):
    """The part of a rank above 0, which has one connection to rank 0."""

    def _open(self) -> None:
        roster, limit = self._rendezvous.roster, self._settings.start_timeout
        try:
            connection = socket.create_connection((roster.addresses[0], roster.port), limit)
        except OSError:  # rank 0 was lost after the rendezvous
            raise missing_error(self._rendezvous, [0], limit) from None
        connection.settimeout(None)
        self._lines = Lines(connection)
        self._lines.send("rank", self._rank)
        self._selector.register(connection, selectors.EVENT_READ, self._read)

    def leave(self, normally: bool) -> None:
        """Notify rank 0, unless after a failure, and close the connection."""
        if normally:
            self._lines.send("left")
        super().leave(normally)

    def _tell(self, reason: str, wait: str) -> None:
        self._lines.send("end", reason, wait)

    def _done(self) -> bool:
        return self._closing or (self.known and self._cut_at is None)

    def _read(self) -> None:
        messages = self._lines.read()
        for message in messages or ():
            match message:
                case ["port", int(port)]:
                    self._port = port
                    self._assembled.set()
                case ["missing", list(missing)]:
                    self._missing = missing
                    self._assembled.set()
                case ["report"]:
                    self._report_wait()
                case ["cause", dict(found)]:
                    self._end_waits(Findings(**found))
        if messages is None:
            self._end_waits(Findings(lost=[0]))

    def _end_waits(self, found: Findings) -> None:
        """Close the connection as well, which shows rank 0 that its answer has arrived."""
        if not self.known:
            self._selector.unregister(self._lines.connection)
            end(self._lines.connection)
            super()._end_waits(found)

    def _tick(self, now: float) -> None:
        if self._told_at is not None and now - self._told_at > _PATIENCE_SECONDS:
            self._end_waits(Findings(unresponsive=[0]))
        super()._tick(now)
