"""Rank 0's part in the liveness of the ranks: it has all connections, and finds the cause."""

import contextlib
import selectors
import socket
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from hpctrain.backends.horovod.liveness import SHOWN, Findings, Lines, Liveness, end
from hpctrain.rendezvous.messages import GRACE_SECONDS

__all__ = ["Hub"]

_SETTLE_SECONDS = 0.5  # from the first known failure to the findings
_REPORT_SECONDS = 3.0  # for ranks to report that they wait, if no failure is known


class Hub(Liveness):
    """The part of rank 0, which has the connections of all others, and serves Horovod's store."""

    def _open(self) -> None:
        listener, store = self._rendezvous.listener, self._store
        assert listener is not None
        assert store is not None
        self._port = store.server_address[1]
        self._everyone = set(range(self._rendezvous.world.world_size))
        self._start_by = time.monotonic() + self._settings.start_timeout
        self._present: dict[int, Lines] = {}
        self._reports: dict[int, tuple[str, str]] = {}
        self._gone: set[int] = set()
        self._left: set[int] = set()
        self._answer: tuple[Any, ...] = ("report",)  # for ranks that connect late
        self._decide_by: float | None = None
        self._leave_by = 0.0
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        # By its number, as the store stays open when this thread ends.
        self._selector.register(store.fileno(), selectors.EVENT_READ, store.handle_request)

    def leave(self, normally: bool) -> None:
        """Wait until the other ranks have left or have the findings, for a limited time."""
        self._leave_by = time.monotonic() + GRACE_SECONDS
        super().leave(normally)

    def _tell(self, reason: str, wait: str) -> None:
        self._reports[0] = (reason, wait)

    def _done(self) -> bool:
        unresponsive = set(self._found.unresponsive) if self._found else set()
        awaited = self._present.keys() - unresponsive
        return self._closing and (not awaited or time.monotonic() > self._leave_by)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            lines = Lines(listener.accept()[0])
            read = partial(self._read, lines)
            self._selector.register(lines.connection, selectors.EVENT_READ, read)

    def _read(self, lines: Lines) -> None:
        messages = lines.read()
        for message in messages or ():
            match message:
                case ["rank", int(rank)] if rank in self._everyone - self._present.keys():
                    lines.rank = rank
                    self._present[rank] = lines
                    if self._assembled.is_set():
                        lines.send(*self._answer)
                case ["end", str(reason), str(wait)] if lines.rank > 0:
                    self._reports[lines.rank] = (reason, wait)
                case ["left"]:
                    self._left.add(lines.rank)
        if messages is None:
            self._selector.unregister(lines.connection)
            end(lines.connection)
            if self._present.pop(lines.rank, None) and lines.rank not in self._left:
                self._gone.add(lines.rank)

    def _send(self, *message: Any) -> None:
        self._answer = message
        for lines in self._present.values():
            lines.send(*message)

    def _tick(self, now: float) -> None:
        super()._tick(now)
        missing = sorted(self._everyone - {0} - self._present.keys())
        if not self._assembled.is_set() and (not missing or now > self._start_by):
            self._missing = missing
            if missing:
                self._send("missing", missing)
            else:
                self._send("port", self._port)
            self._assembled.set()
        if self._found is None and (self._gone or self._reports):
            self._find_cause(now)

    def _find_cause(self, now: float) -> None:
        """Find the cause of a failure, after some time in which ranks may report."""
        if self._decide_by is None:
            self._decide_by = now + _REPORT_SECONDS
            self._send("report")
            self._report_wait()
        reports = dict(self._reports)  # the main thread may add one
        failed = sorted((rank, reason) for rank, (reason, _) in reports.items() if reason)
        if self._gone or failed:
            self._decide_by = min(self._decide_by, now + _SETTLE_SECONDS)
        known = reports.keys() | self._gone
        if now < self._decide_by and not self._everyone <= known:
            return
        lost = sorted(self._gone - dict(failed).keys())
        found = Findings(lost, failed=failed[:SHOWN])
        if not lost and not failed:
            waits = sorted((rank, what) for rank, (_, what) in reports.items() if what)
            unresponsive = sorted(self._everyone - known)
            found = Findings(unresponsive=unresponsive, waits=[] if unresponsive else waits)
        self._send("cause", asdict(found))
        self._end_waits(found)
