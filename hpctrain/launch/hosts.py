"""Interface for starting ranks on hosts that may be lost; see `in_slurm` and `in_other_jobs`.

Python, hpctrain, the script and the run directory must have the same paths on all hosts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.launch.agent import FirstFailure

__all__ = ["Attempt", "Hosts", "HostsEnd", "read_ends"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Parameters of one attempt, equal for all its ranks.

    Attributes:
        command: program and arguments.
        environ: environment of the ranks.
        folder: folder of this attempt, on a file system that all hosts share; only this user can
            read it.
        launch: name of the launcher's run, the same for all its attempts.
        number: number of earlier attempts.
        stopping: whether the ranks are to stop at once, as a signal has come before.
        ends_plain: whether a stop signal ends a program without a session.
        waits: whether the ranks wait until they are needed; see `standby`.
        frees: whether the agents free the copies in memory, and start no ranks.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    launch: str
    number: int
    stopping: bool = False
    ends_plain: bool = False
    waits: bool = False
    frees: bool = False


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


class Hosts(Protocol):
    """Hosts on which ranks can be started.

    Attributes:
        names: names of the hosts, in the order of the ranks.
        agents: whether an agent starts the ranks of each host; only then copies of the state are
            kept in memory.
    """

    names: Sequence[str]
    agents: bool

    def ranks(self, host: str) -> int:
        """Return the number of ranks of a host; at least 1 if it is not known yet."""

    def present(self, launch: str) -> list[str]:
        """Return the hosts that can be used, in order; no rank of an earlier attempt runs there.

        Args:
            launch: name of the launcher's run, as in `Attempt`.
        """

    def answers(self, host: str) -> bool:
        """Check whether a host that did not answer another one answers this process."""

    def fixes(self, host: str) -> Sequence[str]:
        """Return what to type if a host cannot be used."""

    def run(
        self, hosts: Sequence[str], attempt: Attempt, following: Attempt | None = None
    ) -> HostsEnd:
        """Start the ranks on these hosts, and wait until they have ended.

        Args:
            hosts: names of the hosts.
            attempt: this attempt.
            following: the next one, whose ranks may be started meanwhile, to wait; None if there
                will be none.
        """

    def close(self) -> None:
        """End the ranks that wait for an attempt."""


def read_ends(folder: Path, code: int, stopped: bool) -> HostsEnd:
    """Return the end of an attempt from what the agents of the hosts have written.

    Args:
        folder: folder of the attempt.
        code: exit code of the process that started the agents.
        stopped: whether this process got a signal.
    """
    ends = []
    for path in sorted(folder.glob("end-*")):
        try:
            ends.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue  # its host was lost as it wrote
    failures = [FirstFailure(**end["first"]) for end in ends if end["first"]]
    first = min(failures, key=lambda one: (one.caused_by_other_rank, one.time), default=None)
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
