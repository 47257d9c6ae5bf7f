"""The place of a process among the ranks that train together."""

import dataclasses
from dataclasses import dataclass

from hpctrain.errors import ContradictionError

__all__ = ["World"]

# More ranks than any machine has. A larger value is a mistake: rank 0 would wait for all of them.
_MOST_RANKS = 2**20


@dataclass(frozen=True, slots=True)
class World:
    """The place of one rank, computed once from the launcher's variables.

    `rank`, `world_size` and `local_rank` are always set. The other fields are None if the launcher
    has no variable for them. The rendezvous fills them in, so `session.world` is complete.

    Attributes:
        rank: index of this rank, from 0 to world_size - 1.
        world_size: number of ranks.
        local_rank: index among the ranks of this host, from 0.
        local_world_size: number of ranks on this host.
        node_rank: index of this host, from 0.
        num_nodes: number of hosts.
        hosts: names of the hosts, by node rank.
        launcher: name of the launcher that the values come from.

    Raises:
        ContradictionError: the values contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    hosts: tuple[str, ...] | None = None
    launcher: str = "none"

    def __post_init__(self) -> None:
        if self.world_size > _MOST_RANKS:
            raise ContradictionError("HT101.too-many-ranks", world=self, max_ranks=_MOST_RANKS)
        for name, limit_name, below in (
            ("rank", "world_size", True),
            ("local_rank", "local_world_size", True),
            ("local_rank", "world_size", True),
            ("node_rank", "num_nodes", True),
            ("local_world_size", "world_size", False),
            ("num_nodes", "world_size", False),
        ):
            value, limit = getattr(self, name), getattr(self, limit_name)
            if value is None or limit is None or 0 <= value < limit + (not below):
                continue
            key = "HT101.index-out-of-range" if below else "HT101.count-out-of-range"
            raise ContradictionError(
                key, world=self, name=name, value=value, limit_name=limit_name, limit=limit
            )
        local, nodes = self.local_world_size, self.num_nodes
        if nodes is not None and (
            nodes < 1
            or (
                local is not None
                and (
                    local != self.world_size if nodes == 1 else local + nodes - 1 > self.world_size
                )
            )
        ):
            raise ContradictionError("HT101.ranks-do-not-fit-nodes", world=self)
        if self.hosts and self.num_nodes and len(self.hosts) != self.num_nodes:
            count, hosts = len(self.hosts), ", ".join(self.hosts)
            raise ContradictionError(
                "HT101.host-count-differs", world=self, count=count, hosts=hosts
            )

    @property
    def on_one_host(self) -> bool | None:
        """Whether all ranks are on one host; None if the launcher does not provide it."""
        if self.world_size == 1 or self.num_nodes == 1:
            return True
        if self.num_nodes is not None:
            return False
        if self.local_world_size is not None:
            return self.local_world_size == self.world_size
        return None

    def derived(self) -> "World":
        """Return a copy with the fields that follow from the others.

        They do if all ranks are on one host, or if there are as many hosts as ranks.
        """
        if self.on_one_host:
            size = self.world_size
            return dataclasses.replace(self, local_world_size=size, node_rank=0, num_nodes=1)
        if self.num_nodes == self.world_size:
            return dataclasses.replace(self, local_world_size=1)
        return self

    def completed(self, hosts: tuple[str, ...], host_of_rank: tuple[int, ...]) -> "World":
        """Return a copy with all host fields set from the results of the rendezvous.

        Args:
            hosts: names of the hosts, by node rank.
            host_of_rank: for each rank, the index of its host in `hosts`.
        """
        node_rank = host_of_rank[self.rank]
        return dataclasses.replace(
            self,
            local_world_size=host_of_rank.count(node_rank),
            node_rank=node_rank,
            num_nodes=len(hosts),
            hosts=hosts,
        )
