"""Ends of the ranks of each host: an agent writes that of its host, and `hpctrain run` reads all.

They are files in the folder of an attempt, which all hosts share.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.cluster.texts import ranks_text
from hpctrain.launch.supervisor import SECONDS_BETWEEN_CALLS, Outcome

__all__ = ["End", "Ends", "FirstFailure", "HostsEnd", "end_of", "first_of", "read_ends", "write"]

# From the first host that has told a failure to the last one; then the launcher waits for a host
# that is lost, and Slurm does that for minutes.
_SECONDS_FOR_ENDS = 15
# From the last of all ends to the end of the launcher, if a host without ranks may be lost.
_SECONDS_AFTER_ENDS = 3


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """First rank of a host that failed by itself.

    Attributes:
        rank: number of the rank.
        host: name of its host.
        time: time of the failure, in seconds since the epoch.
        caused_by_other_rank: whether the failure of another rank caused it.
        brief: description for a person who has seen the output.
        code: exit code, as in a shell.
        error: code of an error of hpctrain; empty for another failure.
    """

    rank: int
    host: str
    time: float
    caused_by_other_rank: bool
    brief: str
    code: int
    error: str = ""

    @property
    def conclusion(self) -> str:
        """How it failed, for the last line of a start.

        If another rank was the cause of all known failures, none of them is said to be the first.
        """
        return f"{'ended' if self.caused_by_other_rank else 'failed first'}, {self.brief}"


def first_of(failures: Iterable[FirstFailure]) -> FirstFailure | None:
    """Return the first of some failures that no other rank has caused, else the first one."""
    return min(failures, key=lambda one: (one.caused_by_other_rank, one.time), default=None)


@dataclass(frozen=True, slots=True)
class End:
    """End of the ranks of one host.

    Attributes:
        code: exit code of the first rank that failed, as in a shell; 0 on success.
        ranks: number of ranks of all hosts; 0 if the agent could not start its ranks.
        first: first rank of this host that failed, or None.
        signal: signal that the agent has forwarded to the ranks, or None.
        stop_unhandled: whether a stop signal ended ranks before they had a session.
        usage: whether all ranks ended with the exit code of wrong use.
        connected: whether a rank has used one of the stores; True where that is not known, on
            other hosts than the first one.
        lost: name of a host that has not answered this one; empty if all have.
        unfit: names of the hosts that have failed their check before the start; on the first host.
    """

    code: int
    ranks: int
    first: FirstFailure | None = None
    signal: int | None = None
    stop_unhandled: bool = False
    usage: bool = False
    connected: bool = True
    lost: str = ""
    unfit: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class HostsEnd:
    """End of an attempt on all hosts.

    Attributes:
        code: exit code of the first rank that failed, or of the process that started the hosts.
        stopped: whether this process got a signal.
        first: first rank that failed by itself, or None if that is unknown.
        ranks: number of ranks; 0 if unknown.
        usage: whether all ranks ended with the exit code of wrong use.
        suspects: names of hosts that did not answer another host, or that have not told their end.
        unfit: names of hosts that have failed their check before the start.
        folder: folder of the attempt if its ranks had waited; None if it is that of the `Attempt`.
    """

    code: int
    stopped: bool
    first: FirstFailure | None = None
    ranks: int = 0
    usage: bool = False
    suspects: Sequence[str] = ()
    unfit: Sequence[str] = ()
    folder: Path | None = None


def end_of(outcome: Outcome, ranks: int, host: str) -> End:
    """Return the end of the ranks of one host.

    Args:
        outcome: outcome of the supervisor of this host.
        ranks: number of ranks of all hosts.
        host: name of this host.
    """
    first = outcome.first
    found = None
    if first is not None:
        failure = first.failure
        only = {rank.traceback for rank in outcome.ranks} <= {"", first.traceback}
        caused = failure.caused_by_other_rank if failure else first.tail.caused_by_other_rank
        # os._exit(0) on one rank looks like success to the system.
        left = [one.number for one in outcome.ranks if one.code == 0 and one.ended < outcome.failed]
        before = (
            f", after the end of {ranks_text(left)} with exit code 0" if caused and left else ""
        )
        found = FirstFailure(
            rank=first.number,
            host=host,
            time=time.time() - (time.monotonic() - outcome.failed),
            caused_by_other_rank=caused,
            brief=first.describe_end(brief=True, only=only, before=before),
            code=outcome.code,
            error=failure.error if failure else "",
        )
    return End(
        code=outcome.code,
        ranks=ranks,
        first=found,
        signal=outcome.signal,
        stop_unhandled=outcome.stop_unhandled,
        usage=outcome.usage,
    )


def write(end: End, folder: Path, host: str) -> None:
    """Write the end of a host to the folder of the attempt.

    Args:
        end: end of the host.
        folder: folder of the attempt.
        host: index of the host; its name if the agent could not start its ranks.
    """
    rundir.replace(folder / f"end-{host}", json.dumps(asdict(end)))


def read_ends(folder: Path, code: int, stopped: bool) -> HostsEnd:
    """Return the end of an attempt from what the agents of the hosts have written.

    Args:
        folder: folder of the attempt.
        code: exit code of the process that started the agents.
        stopped: whether this process got a signal.
    """
    ends = _read(folder)
    failures = [FirstFailure(**end["first"]) for end in ends if end["first"]]
    first = first_of(failures)
    # The launcher of the agents may have ended the others, which gives it another exit code.
    code = next((end["code"] for end in ends if not end["ranks"]), code)
    if first is not None:
        code = first.code
    return HostsEnd(
        code,
        stopped,
        first,
        ranks=max((end["ranks"] for end in ends), default=0),
        # Ranks that were ended because of those of another host say nothing about it.
        usage=any(end["usage"] for end in ends)
        and all(end["usage"] or end["first"] is None for end in ends),
        suspects=tuple(sorted({end["lost"] for end in ends if end["lost"]})),
        unfit=tuple(host for end in ends for host in end["unfit"]),
    )


def _read(folder: Path) -> list[dict[str, Any]]:
    """Return the fields of the ends in the folder of an attempt."""
    ends = []
    for path in sorted(folder.glob("end-*")):
        try:
            ends.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue  # its host was lost as it wrote
    return ends


class Ends:
    """The ends that the agents of an attempt have written so far.

    Args:
        folder: folder of the attempt.
        hosts: number of hosts.
        others: whether the launcher has also started agents on other hosts, which may be lost.

    Attributes:
        given_up: whether the launcher is no longer waited for.
    """

    def __init__(self, folder: Path, hosts: int, others: bool = False) -> None:
        self.given_up = False
        self._folder, self._hosts, self._others = folder, hosts, others
        self._seconds = 0.0  # since the first host has told a failure
        self._complete = 0.0  # since all hosts have told their end

    def known(self) -> set[int]:
        """Return the indices of the hosts that have told their end."""
        names = (path.name.removeprefix("end-") for path in self._folder.glob("end-*"))
        return {int(name) for name in names if name.isdecimal()}

    def code(self) -> int:
        """Return the largest exit code in the ends."""
        return max((end["code"] for end in _read(self._folder)), default=0)

    def overdue(self) -> bool:
        """Check whether the launcher waits for a lost host; to be called as `meanwhile`."""
        known = self.known()
        if self.given_up or not known:
            return False
        end = read_ends(self._folder, 0, False)
        if end.code or end.suspects:
            self._seconds += SECONDS_BETWEEN_CALLS
        if self._others and len(known) >= self._hosts:
            self._complete += SECONDS_BETWEEN_CALLS
        # A lost host cannot tell its end.
        self.given_up = (
            self._seconds >= _SECONDS_FOR_ENDS
            or self._complete >= _SECONDS_AFTER_ENDS
            or (bool(end.suspects) and len(known) >= self._hosts - 1)
        )
        return self.given_up
