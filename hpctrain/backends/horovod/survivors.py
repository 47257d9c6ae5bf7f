"""The search for lost ranks after a failure, among the ranks that are left.

Horovod reports to the ranks that something failed, to some of them late, and without the cause. So
a thread of rank 0, which serves the rendezvous, finds the cause. The connection of a killed rank is
closed. A rank that failed by itself has stored its reason. If there is neither, the ranks that do
not wait for the others are the ones that keep them waiting. Then every rank cuts Horovod's
connections, so that no rank waits any longer.

    rank → rank 0   a connection that stays open; one byte means that the rank leaves normally
    rank → rank 0   end/RANK: what failed there, and what the rank waits for
    rank 0 → rank   over that connection, a line: "report"; a rank that waits for others reports
    rank 0 → rank   a line: the findings as JSON
    rank → rank 0   end/RANK-received
"""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from hpctrain.backends.barrier import host_of, named
from hpctrain.backends.horovod.rendezvous import Client, RankZeroTimeoutError, Server, be_present
from hpctrain.errors import HpctrainError, RankLostError
from hpctrain.rendezvous import Rendezvous

__all__ = ["Survivors"]

_SCOPE = "end"
_SHOWN = 8  # maximum number of failed or waiting ranks in a message
_SETTLE_SECONDS = 0.5  # from the first known failure to the findings
_REPORT_SECONDS = 3.0  # for ranks to report that they wait, if no failure is known
_PATIENCE_SECONDS = 8.0  # for rank 0 to find the cause
_SHUTDOWN_SECONDS = 1.0  # for Horovod's ranks to end together, if all of them can
_GRACE_SECONDS = 5.0  # for the other ranks to receive the findings, before rank 0 may leave


@dataclass(frozen=True, slots=True)
class _Findings:
    """The findings of rank 0, for all ranks.

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


class Survivors:
    """The ranks of a start that are left after a failure.

    Args:
        rendezvous: all ranks, with their hosts and addresses.
        server: server on rank 0, None on the other ranks.
        waiting: function that returns what the main thread of this rank waits for; empty if it
            does not wait.
        cut: function that ends every such wait with an error.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        server: Server | None,
        waiting: Callable[[], str],
        cut: Callable[[], None],
    ) -> None:
        self._rendezvous, self._server = rendezvous, server
        self._waiting, self._cut = waiting, cut
        self._rank, self._size = rendezvous.world.rank, rendezvous.world.world_size
        place = (rendezvous.roster.addresses[0], rendezvous.roster.port)
        self._store = Client(*place, _SCOPE)
        self._leaving = threading.Event()
        self._findings: _Findings | None = None
        self._known = threading.Event()  # set when the findings are there, or rank 0 is gone
        self._presence = None if server is not None else be_present(*place, self._rank)
        work = self._listen if server is None else self._find_out
        threading.Thread(target=work, name="horovod survivors", daemon=True).start()

    @property
    def known(self) -> bool:
        """Whether rank 0 has found the cause of a failure, or is gone."""
        return self._known.is_set()

    def report_wait(self) -> None:
        """Report that a wait of this rank for others is too long."""
        self._report()

    def report_failure(self, reason: str) -> bool:
        """Report what failed on this rank; return whether rank 0 has received it."""
        return self._report(reason[:1000])

    def find_error(self) -> HpctrainError | None:
        """Return an error about lost or failed ranks, or None if all of them are there."""
        known, found = self._known.is_set(), _Findings(lost=[0])
        if not known:
            try:
                self._store.set(str(self._rank), json.dumps(["", self._waiting()]))
                known = self._known.wait(_PATIENCE_SECONDS)
            except RankZeroTimeoutError:
                found = _Findings(unresponsive=[0])
            except RuntimeError:  # rank 0 is gone; it may have sent its findings before
                known = self._known.wait(_SETTLE_SECONDS)
        return self._error(self._findings if known and self._findings else found)

    def leave(self, normally: bool) -> None:
        """End the presence of this rank. Rank 0, which serves the others, leaves last.

        Args:
            normally: whether all ranks leave normally, without a failure.
        """
        self._leaving.set()
        if self._presence is not None:
            if normally:
                with contextlib.suppress(OSError):  # rank 0 is gone
                    self._presence.sendall(b".")
            self._presence.close()
        if (server := self._server) is None:
            return
        others = set(range(1, self._size))

        def received_by_all() -> bool:
            answers = server.read(_SCOPE)
            received = {rank for rank in others if f"{rank}-received" in answers}
            received |= server.left() | server.gone() | _reasons(server, stated=True).keys()
            unresponsive = self._findings.unresponsive if self._findings else []
            return others <= received.union(unresponsive)

        server.wait(received_by_all, _GRACE_SECONDS)

    def _report(self, reason: str = "") -> bool:
        try:
            self._store.set(str(self._rank), json.dumps([reason, self._waiting()]))
        except RuntimeError:
            return False
        return True

    def _listen(self) -> None:
        """Answer requests of rank 0, and end all waits at its findings; for ranks above 0."""
        assert self._presence is not None
        with contextlib.suppress(OSError, ValueError), self._presence.makefile("r") as lines:
            for line in lines:
                if line == "report\n":
                    self._report_if_waiting()
                else:
                    self._findings = _Findings(**json.loads(line))
                    break
        self._known.set()
        if self._findings is not None and not self._leaving.is_set():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._rank}-received", "")
        self._end_waiting()

    def _end_waiting(self) -> None:
        """Cut the connections; after a failure with a reason, first let Horovod shut down.

        A rank that is cut off while Horovod shuts down waits until gloo's time-out.
        """
        failed = self._findings is not None and self._findings.failed
        if not self._leaving.wait(_SHUTDOWN_SECONDS if failed else 0.0):
            self._cut()

    def _report_if_waiting(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            if self._waiting() and not self._store.check([str(self._rank)]):
                self._report()

    def _find_out(self) -> None:
        """Wait for the first sign of a failure, find the cause, and send it; for rank 0."""
        server, everyone = self._server, set(range(self._size))
        assert server is not None

        def has_failure() -> bool:
            return bool(server.gone() or _reasons(server))

        def has_cause() -> bool:
            return complete() or bool(server.gone() or _reasons(server, stated=True))

        def complete() -> bool:
            return everyone <= _reasons(server).keys() | server.gone()

        while not server.wait(has_failure, _PATIENCE_SECONDS):
            if server.closed:
                return
        server.send_line("report")
        self._report_if_waiting()
        if server.wait(has_cause, _REPORT_SECONDS):
            server.wait(complete, _SETTLE_SECONDS)
        reasons = _reasons(server, stated=True)
        failed = sorted(reasons.items())[:_SHOWN]
        lost = sorted(server.gone() - reasons.keys())
        unresponsive = [] if lost or failed else sorted(everyone - _reasons(server).keys())
        waits = [] if lost or failed or unresponsive else sorted(_waits(server).items())
        self._findings = _Findings(lost, unresponsive, failed, waits)
        server.send_line(json.dumps(asdict(self._findings)))
        self._known.set()
        self._end_waiting()

    def _error(self, found: _Findings) -> HpctrainError | None:
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
            parts += [f"rank {rank} waits for {what}" for rank, what in found.waits[:_SHOWN]]
        if not parts:
            return None
        return RankLostError(
            "HT309",
            "; ".join(parts),
            "all ranks until the end of the run",
            "look for the first error in the log of that rank, and whether its host is up",
        )


def _reasons(server: Server, stated: bool = False) -> dict[int, str]:
    """Return the reason of each rank's failure; empty if another rank is the cause.

    Args:
        server: server on rank 0.
        stated: whether to leave out the empty reasons.
    """
    reasons = {rank: reason for rank, (reason, _) in _reports(server).items()}
    return {rank: reason for rank, reason in reasons.items() if reason or not stated}


def _waits(server: Server) -> dict[int, str]:
    """Return what each rank waits for."""
    return {rank: what for rank, (_, what) in _reports(server).items() if what}


def _reports(server: Server) -> dict[int, tuple[str, str]]:
    reports = [(key, value) for key, value in server.read(_SCOPE).items() if key.isdecimal()]
    return {int(key): tuple(json.loads(value)) for key, value in reports}
