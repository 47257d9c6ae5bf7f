"""The roster: the list of all ranks, and the check that they form a valid world."""

from collections import Counter
from dataclasses import dataclass

from hpctrain.errors import ContradictionError, StartError, UsageError
from hpctrain.rendezvous.messages import Entry

__all__ = ["Roster", "make_roster"]


@dataclass(frozen=True, slots=True)
class Roster:
    """The list of all ranks after the rendezvous, the same on each rank.

    Attributes:
        entries: entry of each rank, by rank ("host", "pid", and the caller's keys).
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


def make_roster(
    entries: tuple[Entry, ...], addresses: tuple[str, ...] = (), port: int = 0, noun: str = "rank"
) -> Roster:
    """Build the roster from the entries of all ranks; the result is the same on every rank.

    Args:
        entries, addresses, port: as in `Roster`.
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
            raise kind(code, where + found, *rest)
    places = [entry["world"] for entry in entries]
    # Use the launcher's host names and node ranks if every rank has a node rank.
    if all(p["node_rank"] is not None for p in places):
        host_of_rank = tuple(p["node_rank"] for p in places)
        first = {node: rank for rank, node in reversed(list(enumerate(host_of_rank)))}
        names = [entries[first[node]]["host"] for node in sorted(first)]
        hosts = tuple(places[0]["hosts"] or names)
    else:
        names = [entry["host"] for entry in entries]
        hosts = tuple(dict.fromkeys(names))
        index = {name: number for number, name in enumerate(hosts)}
        host_of_rank = tuple(index[name] for name in names)
    on_host = Counter(host_of_rank)
    rank_at: dict[tuple[int, int], int] = {}
    for rank, (place, host) in enumerate(zip(places, host_of_rank, strict=True)):
        first_rank = rank_at.setdefault((host, place["local_rank"]), rank)
        if first_rank != rank:
            raise ContradictionError(
                "HT206",
                f"ranks {first_rank} and {rank} both have local rank {place['local_rank']} on "
                f"{hosts[host]}",
                "a local rank of its own for each rank of a host",
                "export LOCAL_RANK as the place of the rank on its host, from 0",
                "where two hosts have one name: export HPCTRAIN_HOSTNAME=NAME on each",
            )
        if place["local_rank"] >= on_host[host]:
            raise ContradictionError(
                "HT206",
                f"rank {rank} has local rank {place['local_rank']}, and there are only "
                f"{on_host[host]} ranks on {hosts[host]}",
                "local ranks below the number of ranks on the host",
                "export LOCAL_RANK as the place of the rank on its host, from 0",
            )
    return Roster(entries, addresses, hosts, host_of_rank, port)
