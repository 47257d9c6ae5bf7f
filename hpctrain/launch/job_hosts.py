"""Hosts of a scheduler's job, any of which may be lost, and how processes start on them.

Python, hpctrain, the script and the run directory must have the same paths on all hosts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.launch import rank_environment
from hpctrain.launch.end import End
from hpctrain.launch.plan import Plan

__all__ = ["JobHosts"]

Command = tuple[list[str], dict[str, str]]


class JobHosts(ABC):
    """Hosts of a job.

    Args:
        counts: number of ranks of each host, by its name, in the order of the ranks; 0 for one for
            each GPU.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it; None for
            `counts`.

    Raises:
        UsageError: `nproc` does not fit the hosts.

    Attributes:
        counts: number of ranks of each host; 0 for one for each GPU.
        agents: whether an agent starts the ranks of each host; otherwise one command starts all.
        unusable: key of the error for nodes that cannot be used.
    """

    unusable: str = "HT210.nodes-unusable"
    agents: bool = True

    def __init__(self, counts: Mapping[str, int], nproc: str | None) -> None:
        ranks: Sequence[int] = list(counts.values())
        if nproc is not None:
            none = [0] * len(counts)
            ranks = none if nproc == "auto" else rank_environment.layout(nproc, none)
        self.counts = dict(zip(counts, ranks, strict=True))

    @property
    def names(self) -> list[str]:
        """Names of the hosts, in the order of the ranks."""
        return list(self.counts)

    @abstractmethod
    def present(self) -> list[str]:
        """Return the hosts that can be used, in order."""

    def answers(self, host: str) -> bool:
        """Check whether a host that was lost answers this process."""
        return False

    @abstractmethod
    def command(
        self, hosts: Sequence[str], plan: Plan, environ: Mapping[str, str], folder: Path
    ) -> Command:
        """Return command and environment of the process that starts the agents, or the ranks.

        Args:
            hosts: names of the hosts.
            plan: plan of the launch.
            environ: environment of the agents or ranks.
            folder: folder of this process, on a file system that all hosts share; only this user
                can read it.
        """

    def end_of(self, folder: Path, end: End) -> End:
        """Return how the ranks ended that the command has started.

        Args:
            folder: folder with their records.
            end: how the command ended.
        """
        return end
