"""The roster: all ranks and their hosts, the check that they form a valid world, and its text."""

import base64
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import ContradictionError, StartError, UsageError
from hpctrain.rendezvous.messages import Entry

__all__ = ["Answer", "Roster", "make_roster", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class Roster:
    """The list of all ranks after the rendezvous.

    Attributes:
        entries: entry of each rank, by rank ("host", "pid", and the caller's keys). Only rank 0 has
            them; the other ranks have none.
        addresses: address at which each rank's host is reached, by rank.
        hosts: names of the hosts, by node rank.
        host_of_rank: index of each rank's host in `hosts`, by rank.
        port: port of rank 0's socket for the backend's store.
    """

    entries: tuple[Entry, ...]
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]
    host_of_rank: tuple[int, ...]
    port: int

    def host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.hosts[self.host_of_rank[rank]]

    @property
    def host_names(self) -> list[str]:
        """Name of each rank's host, by rank."""
        return [self.hosts[host] for host in self.host_of_rank]

    @property
    def ranks_per_host(self) -> list[int]:
        """Number of ranks of each host, by node rank."""
        counts = Counter(self.host_of_rank)
        return [counts[host] for host in range(len(self.hosts))]


@dataclass(frozen=True, slots=True)
class Answer:
    """What rank 0 tells the other ranks of their entries.

    Attributes:
        shared: value for all ranks.
        own: value for each rank, by rank; empty for none.
    """

    shared: Any = None
    own: Sequence[Any] = ()

    def of(self, rank: int) -> Any:
        """Return the value for a rank alone."""
        return self.own[rank] if self.own else None


def make_roster(entries: tuple[Entry, ...], noun: str = "rank") -> Roster:
    """Build the roster from the entries of all ranks, without addresses and port.

    Args:
        entries: as in `Roster`.
        noun: what a rank is called in texts.

    Raises:
        ContradictionError: two ranks of one host have the same local rank, or one is too large.
        HpctrainError: the error in an entry, that of the lowest rank first.
    """
    for rank, entry in enumerate(entries):
        if "error" in entry:
            code, found, *rest = entry["error"]
            kind = UsageError if entry["exit_code"] == UsageError.exit_code else StartError
            where = f"{noun} {rank} on {entry['host']}: " if len(entries) > 1 else ""
            raise kind.of_text(code, where + found, *rest)
    places = [entry["world"] for entry in entries]
    names = [entry["host"] for entry in entries]
    nodes = [place["node_rank"] for place in places]
    # Use the launcher's host names and node ranks if every rank has a node rank.
    if None in nodes:
        hosts = tuple(dict.fromkeys(names))
        index = {name: number for number, name in enumerate(hosts)}
        nodes = [index[name] for name in names]
    else:
        first = dict(zip(reversed(nodes), reversed(names), strict=True))
        hosts = tuple(places[0]["hosts"] or (first[node] for node in sorted(first)))
    on_host = Counter(nodes)
    rank_at: dict[tuple[int, int], int] = {}
    for rank, (place, host) in enumerate(zip(places, nodes, strict=True)):
        first_rank = rank_at.setdefault((host, place["local_rank"]), rank)
        name, size = hosts[host], on_host[host]
        if first_rank != rank:
            raise ContradictionError(
                "HT206.same-local-rank", ranks=(first_rank, rank), place=place, node=name
            )
        if place["local_rank"] >= size:
            raise ContradictionError(
                "HT206.local-rank-too-high", rank=rank, place=place, node=name, size=size
            )
    return Roster(entries, (), hosts, tuple(nodes), 0)


def pack(roster: Roster, shared: Any) -> str:
    """Return the text of a roster without its entries, and of a value for all ranks.

    It is zlib (RFC 1950) in base64 over JSON. The hosts of the ranks are the steps from each rank
    to the next, which repeat in most distributions. So the text has about six bytes for each host.
    """
    addresses = dict(zip(reversed(roster.host_of_rank), reversed(roster.addresses), strict=True))
    nodes = roster.host_of_rank
    value = {
        "hosts": roster.hosts,
        "addresses": [addresses.get(host, "") for host in range(len(roster.hosts))],
        "steps": [b - a for a, b in itertools.pairwise((0, *nodes))],
        "port": roster.port,
        "shared": shared,
    }
    text = json.dumps(value, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(text)).decode()


def unpack(text: str) -> tuple[Roster, Any]:
    """Return the roster and the value from a text of `pack`."""
    value = json.loads(zlib.decompress(base64.b64decode(text)))
    nodes = tuple(itertools.accumulate(value["steps"]))
    addresses = tuple(value["addresses"][host] for host in nodes)
    return Roster((), addresses, tuple(value["hosts"]), nodes, value["port"]), value["shared"]
