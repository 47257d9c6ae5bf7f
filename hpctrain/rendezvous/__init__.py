"""The rendezvous: the ranks of a start connect and receive the roster. asyncio, no torch.

Rank 0 listens on the first free of a few ports that are derived from the start's key. The other
ranks try these ports, on rank 0's host or on all hosts where rank 0 may run, until one answers with
the proof that it belongs to this start. Then they send their entries. If no host is known, rank 0
publishes its addresses in a key-value store. When all ranks are connected, rank 0 compares their
entries, and sends to each the hosts of all ranks, with the address and port of a second socket that
it has bound for the backend's store. What happens to a rank after that is found by the backend.

The messages are lines of JSON:

    rank → rank 0   {"start": …, "challenge": …}
    rank 0 → rank   {"start": …, "proof": …, "challenge": …}      at once: the right server
    rank → rank 0   {"proof": …, "hello": "[rank, world size, entry, objects of the entry]"}
    rank 0 → rank   {"proof": …, "own": …} {"roster": …, "nonce": …}    or
                    {"proof": …} {"error": [code, found, expected, fix…], "exit_code": …}

`messages.Credentials` describes the proofs. The entries stay on rank 0. The line with the roster is
the same for all ranks, and short: some bytes for each host (`roster.pack`). The caller's `check`
decides what the ranks are told of the entries: a value for all of them, and one for each.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.cluster.launchers.base import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.rendezvous import key_value_store
from hpctrain.rendezvous.addresses import LOOPBACK, ports
from hpctrain.rendezvous.client import RendezvousClient
from hpctrain.rendezvous.connections import run
from hpctrain.rendezvous.interfaces import address_on
from hpctrain.rendezvous.key_value_store import KeyValueStore
from hpctrain.rendezvous.messages import (
    GRACE_SECONDS,
    Announce,
    Clock,
    Credentials,
    Entry,
    Participant,
    hello,
    read_hello,
)
from hpctrain.rendezvous.roster import Answer, Roster, make_roster
from hpctrain.rendezvous.server import RendezvousServer

__all__ = ["Answer", "KeyValueStore", "Rendezvous", "Roster", "meet", "ports"]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The result of a rendezvous: a complete World, and what a backend needs to open.

    Attributes:
        world: place of this rank, with all fields set.
        roster: all ranks, with their hosts and addresses.
        shared: what `check` has answered for all ranks.
        own: what it has answered for this rank.
        nonce: prefix for the keys that these ranks exchange; no other start has the same one.
        listener: bound, listening socket with port `roster.port`, owned by the backend; set on
            rank 0 of several ranks, None elsewhere.
        store: the launcher's own store, as given to `meet`.
    """

    world: World
    roster: Roster
    shared: Any
    own: Any
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
    check: Callable[[Roster], Answer | None] = lambda _: None,
    store: KeyValueStore | None = None,
    folder: Path | None = None,
    noun: str = "rank",
    option: str = "--start-timeout",
    clock: Clock = time.monotonic,
) -> Rendezvous:
    """Wait for all ranks of the world, and return the roster and the complete World.

    Args:
        world: place of this rank, from its launcher.
        point: rendezvous point, from the launcher.
        entry: data about this rank for `check`; JSON values.
        timeout: seconds to wait for all ranks, at most `launchers.LONGEST_TIMEOUT`. After that
            the start fails with an error that names the missing ranks. The other ranks wait some
            seconds longer, so that rank 0 can send them this error.
        announce: function called with a status line for the user when waiting takes long.
        error: error that this rank found before the rendezvous. It is sent to all ranks, and all
            of them raise it, so that no rank waits for one that cannot train.
        check: function that rank 0 calls with the roster before it sends the roster; it returns
            what the ranks are told of the entries. If it raises an error, all ranks raise it.
        store: the launcher's own store, in which rank 0 can publish its addresses.
        folder: folder on a file system that all hosts share. If nothing else leads to rank 0, it
            publishes its addresses in a file there during the rendezvous.
        noun: what a rank is called in texts: it may stand for a host.
        option: option of the command that sets `timeout`, for the error; empty without one.
        clock: clock in seconds, for every time-out; tests pass their own.

    Raises:
        StartError: a rank is missing or was lost, or rank 0 cannot be found.
        ContradictionError: two processes have the same rank, or the world sizes differ.
        HpctrainError: the error of a rank, or that of `check`.
    """
    try:
        address = address_on(point.interface) if point.interface else None
    except UsageError as mistake:
        address, error = None, error or mistake
    # Two containers may have the same host name and pid, but not this challenge.
    own: Entry = {"host": point.host, "pid": os.getpid(), "process": Credentials.challenge()}
    own["world"] = {
        "local_rank": world.local_rank,
        "node_rank": world.node_rank,
        "hosts": None if world.rank else world.hosts,  # only rank 0 sends them
    }
    own["address"] = None if world.on_one_host else address
    if error is not None:
        own |= {"error": list(error.args), "exit_code": error.exit_code}
    text = hello(world.rank, world.world_size, own, entry)
    listener = None
    if world.world_size == 1:
        roster = replace(make_roster((read_hello(text, {})[2],)), addresses=(LOOPBACK,))
        answer, nonce = check(roster) or Answer(), Credentials.challenge()
        shared, mine = answer.shared, answer.of(0)
    else:
        kv_store = (
            None if world.on_one_host else key_value_store.choose(world, point, store, folder)
        )
        credentials = Credentials(point.key, point.secret)
        patience = timeout + GRACE_SECONDS if world.rank else timeout
        participant = Participant(
            world, point, credentials, text, kv_store, patience, announce, noun, option, clock
        )
        if world.rank == 0:
            server = RendezvousServer(participant, check)
            roster, shared, mine, nonce, listener = run(server.gather(), clock)
        else:
            roster, shared, mine, nonce = run(RendezvousClient(participant).join(), clock)
    completed = world.completed(roster.hosts, roster.host_of_rank)
    return Rendezvous(completed, roster, shared, mine, nonce, listener, store)
