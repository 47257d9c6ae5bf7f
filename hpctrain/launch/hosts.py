"""Interface for starting ranks on hosts that may be lost; see `over_ssh` and `in_slurm`.

Python, hpctrain, the script and the run directory must have the same paths on all hosts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.cluster.hostlist import expand
from hpctrain.errors import UsageError

__all__ = ["Hosts", "StartParameters", "parse"]

# Commas separate the hosts, except commas in brackets.
_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_SLOTS = re.compile(r"(.+):([0-9]{1,4})\Z")


@dataclass(frozen=True, slots=True)
class StartParameters:
    """Parameters of one start, equal for all its ranks.

    Attributes:
        command: program and arguments.
        environ: environment of the ranks.
        folder: folder of the starts, on a file system that all hosts share; only this user can
            read it.
        exit_status_file: exit status file of rank 0, in that folder.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    exit_status_file: Path


class Hosts(Protocol):
    """Hosts on which ranks can be started.

    Attributes:
        slots: number of ranks of each host, in the order of the ranks.
    """

    slots: Mapping[str, int]

    def present(self, marker: str) -> list[str]:
        """Return the hosts that answer, in order; no rank of an earlier start runs on them.

        Args:
            marker: NAME=VALUE in the environment of all ranks of earlier starts.
        """

    def run(self, hosts: Sequence[str], start: StartParameters) -> tuple[int, bool]:
        """Start the ranks on these hosts, and wait until they have ended.

        Returns:
            Exit code of the process that started them, and whether this process got a signal.
        """


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
