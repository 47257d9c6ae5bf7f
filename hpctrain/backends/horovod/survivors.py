"""After a failure: which ranks are lost, asked by those that are left.

Horovod tells every rank that something is wrong, and none of them what. So rank 0, which serves the
rendezvous, finds out: the connection of a rank that was killed is closed; a rank that failed by
itself has left its reason; and of those that are only silent, nobody knows more.
"""

import contextlib
import datetime
import json
from dataclasses import asdict, dataclass

from hpctrain.backends.assembly import host_of, named
from hpctrain.backends.horovod.rendezvous import Client, Server, be_present
from hpctrain.errors import HpctrainError, RankLostError
from hpctrain.meeting import Meeting

__all__ = ["Survivors"]

_SCOPE = "end"
_SETTLE_SECONDS = 0.5  # from the first rank that is known to be lost to what is said of them
_SILENT_SECONDS = 3.0  # for a rank to say that it is there, where none is known to be lost
_GRACE_SECONDS = 5.0  # for the others to hear it, before rank 0 may leave


@dataclass(frozen=True, slots=True)
class _Findings:
    """What rank 0 found, for all.

    Attributes:
        lost: ranks whose process is gone.
        silent: ranks that do not answer.
        failed: pairs of a rank and what went wrong there.
    """

    lost: list[int]
    silent: list[int]
    failed: list[tuple[int, str]]


class Survivors:
    """The ranks of a start, as far as they are left.

    Args:
        meeting: who is where.
        server: at rank 0, its rendezvous.
    """

    def __init__(self, meeting: Meeting, server: Server | None) -> None:
        self._meeting, self._server = meeting, server
        self._rank, self._size = meeting.world.rank, meeting.world.world_size
        place = (meeting.roll.addresses[0], meeting.roll.port)
        self._store = Client(*place, _SCOPE)
        self._presence = None if self._rank == 0 else be_present(*place, self._rank)

    def close(self) -> None:
        """Be present no more."""
        if self._presence is not None:
            self._presence.close()

    def tell(self, reason: str) -> None:
        """Say what went wrong on this rank, so that the others need not look for it."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            self._store.set(str(self._rank), json.dumps(reason[:1000]))

    def hear(self) -> None:
        """Where rank 0 has failed: let the others ask it why."""
        if self._server is not None:
            with contextlib.suppress(RuntimeError):
                self._find_out(self._server)

    def ask(self) -> HpctrainError | None:
        """What became of the others; None where all of them are there."""
        try:
            if self._server is not None:
                return self._error(self._find_out(self._server))
            self._store.set(str(self._rank), '""')
            limit = _SILENT_SECONDS + _GRACE_SECONDS
            self._store.wait(["findings"], datetime.timedelta(seconds=limit))
            said = json.loads(self._store.get("findings"))
            self._store.set(f"{self._rank}-knows", "")
        except RuntimeError:
            return self._error(_Findings([0], [], []))
        return self._error(_Findings(**said))

    def _find_out(self, server: Server) -> _Findings:
        """At rank 0: look for the lost ones, tell the others, and stay until they know."""
        others = set(range(1, self._size))

        def complete() -> bool:
            return others <= self._reasons(server).keys() | server.gone()

        def known() -> bool:
            return complete() or bool(server.gone()) or any(self._reasons(server).values())

        if server.wait(known, _SILENT_SECONDS):
            server.wait(complete, _SETTLE_SECONDS)
        said, gone = self._reasons(server), server.gone()
        failed = sorted((rank, reason) for rank, reason in said.items() if reason)
        lost = sorted(gone - {rank for rank, _ in failed})
        silent = [] if lost or failed else sorted(others - said.keys())
        found = _Findings(lost, silent, failed)
        self._store.set("findings", json.dumps(asdict(found)))
        asking = {rank for rank, reason in said.items() if not reason and rank}

        def heard() -> bool:
            answers = server.read(_SCOPE)
            knowing = {rank for rank in asking if f"{rank}-knows" in answers}
            return asking <= knowing | server.gone()

        server.wait(heard, _GRACE_SECONDS)
        return found

    @staticmethod
    def _reasons(server: Server) -> dict[int, str]:
        """By rank, what went wrong there: of those that have said something; mostly nothing."""
        said = server.read(_SCOPE).items()
        return {int(key): json.loads(value) for key, value in said if key.isdecimal()}

    def _error(self, found: _Findings) -> HpctrainError | None:
        meeting = self._meeting
        parts = [
            f"rank {rank} on {host_of(meeting, rank)} failed: {reason}"
            for rank, reason in found.failed[:4]
            if rank != self._rank
        ]
        if found.lost:
            parts.append(f"{named(meeting, found.lost)}: the process is gone")
        if found.silent:
            parts.append(f"{named(meeting, found.silent)}: no answer, neither to Horovod nor to us")
        if not parts:
            return None
        return RankLostError(
            "; ".join(parts),
            "all ranks, to the end",
            "look for the first error in the log of that rank, and whether its host is up",
        )
