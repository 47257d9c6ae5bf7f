"""Where rank 0 can be found: an address, and a few ports that follow from the start's key."""

import hashlib

from hpctrain import variables
from hpctrain.errors import StartError
from hpctrain.launchers.base import MeetingPoint
from hpctrain.world import World

__all__ = ["LOOPBACK", "address_of", "ports"]

# Below the ephemeral ranges of Linux (from 32768) and of IANA, above the well-known ports.
_PORT_RANGE = range(20000, 32000)
_PORTS_TO_TRY = 16
LOOPBACK = "127.0.0.1"


def ports(point: MeetingPoint) -> list[int]:
    """The ports to try, in order: the one that was given, then those that follow from the key."""
    digest = hashlib.sha256(f"port/{point.key}".encode()).digest()
    first, stride = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big") | 1
    size = len(_PORT_RANGE)
    derived = [_PORT_RANGE[(first + i * stride) % size] for i in range(_PORTS_TO_TRY)]
    given = [point.port] if point.port else []
    return list(dict.fromkeys(given + derived))


def address_of(world: World, point: MeetingPoint) -> str:
    """Where rank 0 is."""
    if world.on_one_host:
        return LOOPBACK  # nobody else needs to reach it
    if point.address:
        return point.address
    raise StartError(
        f"{world.launcher} started {world.world_size} ranks and does not say where rank 0 is",
        "its host name or address",
        f"export {variables.MAIN_ADDRESS}=HOST    (the host of rank 0, the same on all ranks)",
    )
