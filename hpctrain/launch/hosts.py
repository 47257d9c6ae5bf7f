"""Interface for starting ranks on hosts that may be lost; see `over_ssh` and `in_slurm`.

Python, hpctrain, the script and the run directory must have the same paths on all hosts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.cluster.hostlist import expand
from hpctrain.errors import UsageError
from hpctrain.launch.agent import FirstFailure

__all__ = ["Attempt", "Hosts", "HostsEnd", "parse", "read_ends"]

# Commas separate the hosts, except commas in brackets.
_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_SLOTS = re.compile(r"(.+):([0-9]{1,4})\Z")


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
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    launch: str
    number: int
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class HostsEnd:
    """End of an attempt on all hosts.

    Attributes:
        code: exit code of the first rank that failed, or of the process that started the hosts.
        stopped: whether this process got a signal.
        first: first rank that failed by itself, or None if that is unknown.
        ranks: number of ranks; 0 if unknown.
        usage: whether all ranks ended with the exit code of wrong use.
    """

    code: int
    stopped: bool
    first: FirstFailure | None = None
    ranks: int = 0
    usage: bool = False


class Hosts(Protocol):
    """Hosts on which ranks can be started.

    Attributes:
        names: names of the hosts, in the order of the ranks.
    """

    names: Sequence[str]

    def ranks(self, host: str) -> int:
        """Return the number of ranks of a host; at least 1 if it is not known yet."""

    def present(self, launch: str) -> list[str]:
        """Return the hosts that can be used, in order; no rank of an earlier attempt runs there.

        Args:
            launch: name of the launcher's run, as in `Attempt`.
        """

    def fixes(self, host: str) -> Sequence[str]:
        """Return what to type if a host cannot be used."""

    def run(self, hosts: Sequence[str], attempt: Attempt) -> HostsEnd:
        """Start the ranks on these hosts, and wait until they have ended."""


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
    if first is not None:
        code = first.code
    return HostsEnd(
        code,
        stopped,
        first,
        ranks=ends[0]["ranks"] if ends else 0,
        usage=bool(ends) and all(end["usage"] for end in ends),
    )


def parse(text: str, slots: int) -> dict[str, int]:
    """Return the ranks of each host from a text such as `node[1-2]:4,node7`.

    Args:
        text: hosts, separated by commas: a Slurm host list with an optional `:N` after each name.
        slots: number of ranks of a host without `:N`.

    Raises:
        UsageError: the text has no host, or a host twice, or is not a host list.
    """
    found: dict[str, int] = {}
    items = _ITEM.findall(text)
    if ",".join(items) != text:
        items = [text]  # a bracket is not closed; `expand` raises the error
    for item in items:
        match = _SLOTS.match(item)
        name, count = (match[1], int(match[2])) if match else (item, slots)
        for host in expand(name):
            if host in found or ":" in host or not count:
                raise UsageError(
                    "HT213",
                    f"--hosts {text}: {item}",
                    "names or IPv4 addresses, each once, and a number of ranks from 1 on",
                    "--hosts node1:4,node2:4",
                    "--hosts 'node[1-2]:4'",
                )
            found[host] = count
    if not found:
        raise UsageError(
            "HT213", f"--hosts {text!r} names no host", "hosts", "--hosts node1:4,node2:4"
        )
    return found
