"""After a failure: which ranks are lost, asked by those that are left.

Horovod tells the ranks that something is wrong, some of them late, and none of them what. So rank
0, which serves the rendezvous, finds out: the connection of a rank that was killed is closed; a
rank that failed by itself has left its reason; and of one that is only silent nobody knows more.
"""

import contextlib
import datetime
import json
import threading
from dataclasses import asdict, dataclass

from hpctrain.backends.assembly import host_of, named
from hpctrain.backends.horovod.rendezvous import Client, NoAnswerError, Server, be_present
from hpctrain.errors import HpctrainError, RankLostError
from hpctrain.meeting import Meeting

__all__ = ["Survivors"]

_SCOPE = "end"
_SETTLE_SECONDS = 0.5  # from the first rank that is known to be lost to what is said of them
_SILENT_SECONDS = 3.0  # for a rank to say that it is there, where none is known to be lost
_PATIENCE_SECONDS = 8.0  # for rank 0 to find out
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
        if server is not None:
            # A thread, as rank 0 itself may be the last one to notice.
            threading.Thread(target=self._find_out, args=(server,), daemon=True).start()

    def close(self) -> None:
        """Be present no more."""
        if self._presence is not None:
            self._presence.close()

    def tell(self, reason: str) -> None:
        """Say what went wrong on this rank, so that the others need not look for it."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            self._store.set(str(self._rank), json.dumps(reason[:1000]))

    def ask(self) -> HpctrainError | None:
        """What became of the others; None where all of them are there."""
        try:
            self._store.set(str(self._rank), '""')
            self._store.wait(["findings"], datetime.timedelta(seconds=_PATIENCE_SECONDS))
            said = json.loads(self._store.get("findings"))
            self._store.set(f"{self._rank}-knows", "")
        except NoAnswerError:
            return self._error(_Findings([], [0], []))
        except RuntimeError:
            return self._error(_Findings([0], [], []))
        return self._error(_Findings(**said))

    def stay(self) -> None:
        """At rank 0, which serves the findings: until the others have heard them."""
        server = self._server
        if server is None:
            return
        others = set(range(1, self._size))

        def heard() -> bool:
            answers = server.read(_SCOPE)
            through = {rank for rank in others if f"{rank}-knows" in answers}
            through |= server.gone() | _reasons(server, told=True).keys()
            silent = json.loads(answers.get("findings", b"{}")).get("silent", [])
            return others <= through.union(silent)

        server.wait(heard, _GRACE_SECONDS)

    def _find_out(self, server: Server) -> None:
        """Wait for the first sign of a failure, look who is to blame, and leave word of it."""
        everyone = set(range(self._size))

        def sign() -> bool:
            return bool(server.gone() or _reasons(server))

        def known() -> bool:
            return complete() or bool(server.gone() or _reasons(server, told=True))

        def complete() -> bool:
            return everyone <= _reasons(server).keys() | server.gone()

        while not server.wait(sign, _PATIENCE_SECONDS):
            if server.closed:
                return
        if server.wait(known, _SILENT_SECONDS):
            server.wait(complete, _SETTLE_SECONDS)
        failed = sorted(_reasons(server, told=True).items())
        lost = sorted(server.gone() - dict(failed).keys())
        silent = [] if lost or failed else sorted(everyone - _reasons(server).keys())
        with contextlib.suppress(RuntimeError):  # closed by now
            self._store.set("findings", json.dumps(asdict(_Findings(lost, silent, failed))))

    def _error(self, found: _Findings) -> HpctrainError | None:
        meeting = self._meeting
        parts = [
            f"rank {rank} on {host_of(meeting, rank)} failed: {reason}"
            for rank, reason in found.failed[:4]
            if rank != self._rank
        ]
        if found.lost:
            parts.append(f"{named(meeting, found.lost)}: the process is gone")
        if self._rank in found.silent:
            parts.append("the other ranks have waited for this one in vain")
        elif found.silent:
            parts.append(f"{named(meeting, found.silent)}: no answer")
        if not parts:
            return None
        return RankLostError(
            "; ".join(parts),
            "all ranks, to the end",
            "look for the first error in the log of that rank, and whether its host is up",
        )


def _reasons(server: Server, told: bool = False) -> dict[int, str]:
    """By rank, what went wrong there; mostly nothing, where another rank is to blame.

    Args:
        server: at rank 0.
        told: leave out those with nothing.
    """
    said = [(key, value) for key, value in server.read(_SCOPE).items() if key.isdecimal()]
    reasons = {int(key): json.loads(value) for key, value in said}
    return {rank: reason for rank, reason in reasons.items() if reason or not told}
