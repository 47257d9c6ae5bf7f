"""Where do the ranks meet, and who is there? Plain sockets, no torch.

Rank 0 listens on the first free of a few ports that follow from the start's key. The others ask
those ports, at rank 0's host or at all hosts where it may be, until one answers with the proof
that it belongs to this start, and say who they are. Where no host is known, rank 0 leaves word on
a board. When all are there, rank 0 sends everyone the roster, with the address and port of a second
socket that it has bound for the backend's store, and when all have heard it they begin.

The messages are lines of JSON:

    rank → rank 0   {"start": …, "challenge": …}
    rank 0 → rank   {"start": …, "proof": …, "challenge": …}      at once: this is the right place
    rank → rank 0   {"proof": …, "hello": "[rank, world size, entry]"}
    rank 0 → rank   {"proof": …} {"roster": …, "addresses": […], "port": …, "nonce": …}
    rank → rank 0   {"heard": …}
    rank 0 → rank   {"proof": …} {"begin": true}         or, in place of roster or begin,
                    {"proof": …} {"error": [found, expected, fix], "code": …}

`messages.Credentials` says what the proofs prove.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.launchers.base import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.rendezvous import key_value_store
from hpctrain.rendezvous.addresses import LOOPBACK, ports
from hpctrain.rendezvous.client import RendezvousClient
from hpctrain.rendezvous.interfaces import address_on
from hpctrain.rendezvous.key_value_store import KeyValueStore
from hpctrain.rendezvous.messages import GRACE_SECONDS, Announce, Clock, Credentials, Entry
from hpctrain.rendezvous.roster import Roster, make_roster
from hpctrain.rendezvous.server import RendezvousServer

__all__ = ["KeyValueStore", "Rendezvous", "Roster", "meet", "ports"]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The outcome: a complete World, and what a backend needs to open.

    Attributes:
        world: this rank, with nothing left open.
        roster: the ranks, their hosts and addresses.
        nonce: a prefix for everything that these ranks exchange; no other start has it.
        listener: on rank 0 of several ranks the bound, listening socket whose port is
            `roster.port`; it belongs to the backend now. None elsewhere.
        store: the launcher's own store, as it was given to `meet`.
    """

    world: World
    roster: Roster
    nonce: str
    listener: socket.socket | None = None
    store: KeyValueStore | None = None


def meet(
    world: World,
    point: RendezvousPoint,
    entry: Entry,
    timeout: float = 300.0,
    announce: Announce = lambda _: None,
    error: HpctrainError | None = None,
    *,
    check: Callable[[Roster], None] = lambda _: None,
    store: KeyValueStore | None = None,
    folder: Path | None = None,
    clock: Clock = time.monotonic,
) -> Rendezvous:
    """Wait for all ranks of the world, and learn who they are.

    Args:
        world: this rank, as its launcher has it.
        point: where the launcher lets the ranks meet.
        entry: what to tell the others; JSON values.
        timeout: seconds until those who have not come are named and the start is given up; at
            most `launchers.LONGEST_TIMEOUT`. The others give rank 0 some seconds more to say so.
        announce: called with a line for people when waiting takes long.
        error: what this rank found wrong before it came. It is told to all ranks, and all of
            them raise it, so nobody waits for a rank that cannot train.
        check: what rank 0 does with the roster before anybody else gets it. What it raises is
            raised by all ranks.
        store: the launcher's own store, as a place to leave word.
        folder: on a file system that all hosts share: a word of rank 0 is left there for as long
            as the rendezvous takes, where nothing else leads to it.
        clock: seconds, for every time-out; a test moves one of its own.

    Raises:
        StartError: a rank did not come, was lost, or rank 0 cannot be found.
        ContradictionError: two processes say that they are the same rank, or sizes differ.
        HpctrainError: the error that a rank brought, or that of `check`.
    """
    try:
        address = address_on(point.interface) if point.interface else None
    except UsageError as mistake:
        address, error = None, error or mistake
    entry = {**entry, "host": point.host, "pid": os.getpid(), "world": _places(world)}
    # Host and pid do not tell containers apart.
    entry["process"] = Credentials.challenge()
    entry["address"] = None if world.on_one_host else address
    if error is not None:
        entry["error"] = [error.found, error.expected, error.fix]
        entry["code"] = error.exit_code
    credentials = Credentials(point.key, point.secret)
    listener = None
    if world.world_size == 1:
        roster, nonce = make_roster((entry,), (LOOPBACK,), 0), Credentials.challenge()
        check(roster)
    else:
        kv_store = (
            None if world.on_one_host else key_value_store.choose(world, point, store, folder)
        )
        if world.rank == 0:
            server = RendezvousServer(
                world, point, credentials, entry, kv_store, timeout, announce, check, clock
            )
            roster, nonce, listener = server.gather()
        else:
            patience = timeout + GRACE_SECONDS
            client = RendezvousClient(
                world, point, credentials, entry, kv_store, patience, announce, clock
            )
            roster, nonce = client.join()
    completed = world.completed(roster.hosts, roster.host_of_rank)
    return Rendezvous(completed, roster, nonce, listener, store)


def _places(world: World) -> dict[str, Any]:
    return {
        "local_rank": world.local_rank,
        "node_rank": world.node_rank,
        # As JSON has it, so that all rolls are equal; one rank says it for all.
        "hosts": list(world.hosts) if world.hosts and world.rank == 0 else None,
        "launcher": world.launcher,
    }
