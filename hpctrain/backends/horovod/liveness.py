"""The liveness of the ranks: which are gone, have failed, or keep the others waiting.

Horovod reports to the ranks that something failed, to some of them late, and without the cause. Its
stall inspector finds no missing rank over gloo. So each rank keeps a connection to rank 0 (rank 0
too), on the socket that the rendezvous bound, and one thread watches it. The connection of a killed
rank ends. A rank that fails, or has waited too long for the others, reports that. Rank 0 then asks
all ranks that wait, and finds the cause (`liveness_hub`): ranks that are gone or have failed, else
those that do not wait for the others. At its answer every rank cuts Horovod's connections, or it
would wait for gloo's time-out. The thread of rank 0 serves Horovod's store as well.

    rank → rank 0   ["rank", RANK]            the first message
    rank 0 → rank   ["port", PORT]            all ranks are there; port of Horovod's store
    rank 0 → rank   ["missing", RANKS]        some ranks did not come in time
    rank → rank 0   ["end", REASON, WAIT]     what failed there, and what the rank waits for
    rank 0 → rank   ["report"]                a rank sends "end" as soon as it waits for others
    rank 0 → rank   ["cause", FINDINGS]       the rank then closes its connection
    rank → rank 0   ["left"]                  the rank leaves normally
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hpctrain.backends.base import missing_error
from hpctrain.backends.horovod.liveness_hub import SHOWN, Findings, Hub
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster import system
from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import HpctrainError, RankLostError
from hpctrain.rendezvous import Rendezvous
from hpctrain.rendezvous.connections import Connection, run
from hpctrain.rendezvous.http_store import HttpStore
from hpctrain.rendezvous.messages import GRACE_SECONDS, encode, keep_alive

__all__ = ["Connections", "Liveness", "Wait"]

_TICK_SECONDS = 0.1
_PATIENCE_SECONDS = 8.0  # for rank 0 to find the cause
_SHUTDOWN_SECONDS = 1.0  # for Horovod's ranks to end together, if all of them can


class Wait:
    """The wait of the main thread for the other ranks: `with wait("gradients"): …`.

    Attributes:
        what: what the main thread waits for; empty if it does not wait.
        since: time when the wait began; None if the main thread does not wait.
    """

    def __init__(self) -> None:
        self.what = ""
        self.since: float | None = None

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Note what the main thread waits for, until the end of the context."""
        self.what, self.since = what, time.monotonic()
        try:
            yield
        finally:
            self.what, self.since = "", None


class Connections:
    """The TCP connections that Horovod opens between `__enter__` and `__exit__`.

    Horovod's thread waits in gloo for a peer that is gone, until gloo's time-out. Only the end of
    the connection wakes it earlier. Linux lists the open files of a process, sockets with a number
    that is not used again.
    """

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._opened: set[str] = set()

    def __enter__(self) -> None:
        self._before = set(_sockets())

    def __exit__(self, *error: object) -> None:
        self._opened = set(_sockets()) - self._before

    def cut(self) -> None:
        """Shut down the connections: every wait for data on them ends with an error."""
        for name, number in _sockets().items():
            if name in self._opened:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6):
                        end.shutdown(socket.SHUT_RDWR)


class Liveness:
    """The part of this rank in the search for lost ranks.

    Args:
        rendezvous: all ranks, with their hosts and addresses.
        settings: time-outs of the start and of a wait.
        wait: wait of the main thread for the other ranks.
        cut: function that ends every such wait with an error.
        store: Horovod's store, on rank 0.
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
        self._outbox: list[tuple[Any, ...]] = []  # messages that the thread has to send
        self._connection: Connection | None = None
        self._asked = False  # whether rank 0 wants to know what this rank waits for
        self._told_at: float | None = None  # when this rank reported a failure or a long wait
        self._cut_at: float | None = None
        self._closing = False
        self._thread = threading.Thread(
            target=lambda: run(self._watch(), time.monotonic), name="horovod liveness", daemon=True
        )
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
        self._outbox.append(("end", reason[:1000], self._wait.what))

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
        if normally:
            self._outbox.append(("left",))
        self._closing = True
        self._thread.join()

    async def _watch(self) -> None:
        """Handle messages and time limits, in the thread."""
        hub, store, listener = None, self._store, self._rendezvous.listener
        if store is not None and listener is not None:
            hub = Hub(self._rendezvous.world.world_size, store.server_address[1])
            hub.start(listener, self._settings.start_timeout)
            # By its number, as the store stays open when this thread ends.
            asyncio.get_running_loop().add_reader(store.fileno(), store.handle_request)
        talking = asyncio.create_task(self._talk())
        while not self._closing:
            await asyncio.sleep(_TICK_SECONDS)
            self._tick(time.monotonic())
        self._send()
        talking.cancel()
        if hub is not None and listener is not None:
            await hub.leave(GRACE_SECONDS)
            listener.close()

    async def _talk(self) -> None:
        """Receive the messages of rank 0, until it has found a cause or is gone."""
        roster = self._rendezvous.roster
        try:
            streams = await asyncio.open_connection(roster.addresses[0], roster.port)
            connection = self._connection = Connection(*streams)
            keep_alive(connection.socket)
            connection.send(encode(["rank", self._rank]))
            while not self.known:
                self._handle(json.loads(await connection.read()))
        except (OSError, ValueError):
            self._end_waits(Findings(lost=[0]))
        finally:
            # This shows rank 0 that its answer has arrived.
            if self._connection is not None:
                self._connection.close()

    def _handle(self, received: object) -> None:
        match received:
            case ["port", int(port)]:
                self._port = port
                self._assembled.set()
            case ["missing", list(missing)]:
                self._missing = missing
                self._assembled.set()
            case ["report"]:
                self._asked = True
            case ["cause", dict(found)]:
                self._end_waits(Findings(**found))

    def _send(self) -> None:
        """Send what the main thread has to say, once there is a connection."""
        while self._connection is not None and self._outbox:
            self._connection.send(encode(self._outbox.pop(0)))

    def _tick(self, now: float) -> None:
        since = self._wait.since
        waits_long = since is not None and now - since > self._settings.timeout
        # A rank that is asked between two waits reports at the next one.
        if (waits_long or (self._asked and since is not None)) and self._told_at is None:
            self.report()
        self._send()
        if self._told_at is not None and now - self._told_at > _PATIENCE_SECONDS:
            self._end_waits(Findings(unresponsive=[0]))
        if self._cut_at is not None and now >= self._cut_at:
            self._cut_at = None
            self._cut()

    def _end_waits(self, found: Findings) -> None:
        """Take over the findings, and end all waits.

        A rank that is cut off while Horovod shuts down waits until gloo's time-out. So after a
        failure that was reported, Horovod has time to shut down.
        """
        if self.known:
            return
        self._found = found
        self._cut_at = time.monotonic() + (_SHUTDOWN_SECONDS if found.failed else 0.0)
        self._known.set()
        self._assembled.set()

    def _error(self, found: Findings) -> HpctrainError | None:
        roster = self._rendezvous.roster
        parts = [
            f"rank {rank} on {roster.host(rank)} failed: {reason}"
            for rank, reason in found.failed
            if rank != self._rank
        ]
        if found.lost:
            parts.append(f"{ranks_text(found.lost, roster.host_names)}: the process is gone")
        if self._rank in found.unresponsive:
            parts.append("the other ranks waited for this rank, which did not answer in time")
        elif found.unresponsive:
            parts.append(f"{ranks_text(found.unresponsive, roster.host_names)}: no answer")
        if len(set(dict(found.waits).values())) > 1:
            parts += [f"rank {rank} waits for {what}" for rank, what in found.waits[:SHOWN]]
        if not parts:
            return None
        return RankLostError("HT309.ranks-failed", failures="; ".join(parts))


def _sockets() -> dict[str, int]:
    """Return the file descriptor of each open socket, by its name, such as "socket:[4711]"."""
    open_files = system.descriptors()
    return {name: number for number, name in open_files.items() if name.startswith("socket:")}
