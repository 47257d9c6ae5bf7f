"""What can start ranks on hosts of which some may be lost; see `over_ssh` and `in_slurm`.

All need Python, hpctrain, the script and the run directory in the same place on all hosts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.cluster.hostlist import expand
from hpctrain.errors import UsageError

__all__ = ["Hosts", "Start", "parse"]

# Commas part the hosts, but for those in brackets.
_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_SLOTS = re.compile(r"(.+):([0-9]{1,4})\Z")


@dataclass(frozen=True, slots=True)
class Start:
    """What is the same for all ranks of one start.

    Attributes:
        command: program and arguments.
        environ: for the ranks.
        folder: of the starts, on a file system that all hosts share; nobody else can read it.
        verdict: the file in there to which rank 0 writes how the run ended.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    verdict: Path


class Hosts(Protocol):
    """Where ranks can be started.

    Attributes:
        slots: by host the number of its ranks, in the order of the ranks.
    """

    slots: Mapping[str, int]

    def present(self, marker: str) -> list[str]:
        """The hosts that answer now, in their order. No rank of an earlier start runs on them.

        Args:
            marker: NAME=VALUE in the environment of every rank of the earlier starts.
        """

    def run(self, hosts: Sequence[str], start: Start) -> tuple[int, bool]:
        """Start the ranks on these hosts, and wait for their end.

        Returns:
            The code of whoever started them, and whether a signal came here meanwhile.
        """


def parse(text: str, slots: int) -> dict[str, int]:
    """`node[1-2]:4,node7` by host.

    Args:
        text: hosts with commas, a Slurm host list with `:N` after each name.
        slots: ranks of a host without a number.

    Raises:
        UsageError: no host, a host twice, or what is no host list.
    """
    found: dict[str, int] = {}
    items = _ITEM.findall(text)
    if ",".join(items) != text:
        items = [text]  # a bracket is open, which `expand` explains
    for item in items:
        match = _SLOTS.match(item)
        name, count = (match[1], int(match[2])) if match else (item, slots)
        for host in expand(name):
            if host in found or ":" in host or not count:
                raise UsageError(
                    f"--hosts {text}: {item}",
                    "names or IPv4 addresses, each once, and a number of ranks from 1 on",
                    "--hosts node1:4,node2:4    or: --hosts 'node[1-2]:4'",
                )
            found[host] = count
    if not found:
        raise UsageError(f"--hosts {text!r} names no host", "hosts", "--hosts node1:4,node2:4")
    return found
