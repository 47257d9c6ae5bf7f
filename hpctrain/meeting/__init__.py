"""Where do the ranks meet, and who is there? Plain sockets, no torch.

Rank 0 listens on the first free of a few ports that follow from the start's key. The others ask
those ports in turn until one answers with the nonce, and say who they are. When all are there,
rank 0 sends the roll to everyone, with the address and port of a second socket that it has bound
for the backend's store.

The messages are lines of JSON:

    rank → rank 0   {"nonce": …, "rank": …, "world_size": …, "entry": {…}}
    rank 0 → rank   {"nonce": …}                    at once: this is the right place
    rank 0 → rank   {"roll": […], …}, or {"error": [found, expected, fix], "code": …}

The nonce keeps two jobs apart that use one port by accident. It is no protection against malice.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.launchers.base import MeetingPoint
from hpctrain.meeting.guest import join
from hpctrain.meeting.host import Host
from hpctrain.meeting.messages import GRACE_SECONDS, Announce, Entry
from hpctrain.meeting.place import LOOPBACK, ports
from hpctrain.meeting.roll import Roll, call_roll
from hpctrain.world import World

__all__ = ["Meeting", "Roll", "meet", "ports"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The outcome: a complete World, and what a backend needs to open.

    Attributes:
        world: this rank, with nothing left open.
        roll: who is there.
        nonce: a prefix for everything that these ranks exchange.
        listener: on rank 0 of several ranks the bound, listening socket whose port is
            `roll.port`; it belongs to the backend now. None elsewhere.
    """

    world: World
    roll: Roll
    nonce: str
    listener: socket.socket | None = None


def meet(
    world: World,
    point: MeetingPoint,
    entry: Entry,
    timeout: float = 300.0,
    announce: Announce = lambda _: None,
    error: HpctrainError | None = None,
) -> Meeting:
    """Wait for all ranks of the world, and learn who they are.

    Args:
        world: this rank, as its launcher has it.
        point: where the launcher lets the ranks meet.
        entry: what to tell the others; JSON values.
        timeout: seconds until those who have not come are named and the start is given up.
        announce: called with a line for people when waiting takes long.
        error: what this rank found wrong before it came. It is told to all ranks, and all of
            them raise it, so nobody waits for a rank that cannot train.

    Raises:
        StartError: a rank did not come, or rank 0 cannot be found.
        ContradictionError: two processes say that they are the same rank, or sizes differ.
        HpctrainError: the error that a rank brought.
    """
    entry = {**entry, "host": point.host, "pid": os.getpid(), "world": _places(world)}
    if error is not None:
        entry["error"] = [error.found, error.expected, error.fix]
        entry["code"] = error.exit_code
    nonce = hashlib.sha256(f"hpctrain/{point.key}".encode()).hexdigest()[:32]
    listener = None
    if world.world_size == 1:
        roll = call_roll((entry,), (LOOPBACK,), 0)
    elif world.rank == 0:
        roll, listener = Host(world, point, nonce, entry, timeout, announce).gather()
    else:
        roll = join(world, point, nonce, entry, timeout + GRACE_SECONDS, announce)
    return Meeting(world.completed(roll.hosts, roll.host_of_rank), roll, nonce, listener)


def _places(world: World) -> dict[str, Any]:
    return {
        "local_rank": world.local_rank,
        "node_rank": world.node_rank,
        # As JSON has it, so that all rolls are equal; one rank says it for all.
        "hosts": list(world.hosts) if world.hosts and world.rank == 0 else None,
        "launcher": world.launcher,
    }
