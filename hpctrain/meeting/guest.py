"""The side of a rank above 0: it finds rank 0, says who it is, and waits for the roll."""

import socket
import time
from typing import Any

from hpctrain import variables
from hpctrain.errors import StartError, repeated
from hpctrain.launchers.base import MeetingPoint
from hpctrain.meeting.messages import (
    LONGEST_HELLO,
    LONGEST_LINE,
    NEWS_SECONDS,
    Announce,
    Entry,
    decode,
    encode,
)
from hpctrain.meeting.place import address_of, ports
from hpctrain.meeting.roll import Roll, call_roll
from hpctrain.world import World

__all__ = ["join"]

# A stranger on a port may accept and say nothing: then the next port is tried.
_ANSWER_SECONDS = 3.0


def join(
    world: World,
    point: MeetingPoint,
    nonce: str,
    entry: Entry,
    timeout: float,
    announce: Announce,
) -> Roll:
    """A rank above 0: find rank 0, say who I am, wait for the roll."""
    address = address_of(world, point)
    candidates = ports(point)
    hello = {"nonce": nonce, "rank": world.rank, "world_size": world.world_size, "entry": entry}
    started = time.monotonic()
    news = started + NEWS_SECONDS
    pause = 0.02
    tried = ""
    while time.monotonic() < started + timeout:
        for port in candidates:
            try:
                answer = _ask(address, port, hello, started + timeout)
            except OSError as error:
                tried = str(error)
                continue
            if answer is not None:
                return _read(answer)
        if time.monotonic() > news:
            announce(f"rank {world.rank} looks for rank 0 at {address}: {tried}")
            news += NEWS_SECONDS
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    raise StartError(
        f"rank {world.rank} on {entry['host']} did not find rank 0 at {address}, ports "
        f"{', '.join(map(str, candidates[:3]))}, … within {timeout:.0f} s ({tried})",
        "rank 0 listening there",
        "look for the first error in the log of rank 0; if it is on another host: "
        f"export {variables.MAIN_ADDRESS}=HOST",
    )


def _ask(address: str, port: int, hello: dict[str, Any], deadline: float) -> dict[str, Any] | None:
    """Rank 0's last word, or None where somebody else has this port.

    Raises:
        OSError: nobody is there, or whoever it was went away.
    """
    with socket.create_connection((address, port), timeout=_ANSWER_SECONDS) as connection:
        if connection.getsockname() == connection.getpeername():
            return None  # on a free local port TCP can connect a socket to itself
        connection.sendall(encode(hello))
        with connection.makefile("rb") as reader:
            greeting = decode(reader.readline(LONGEST_HELLO))
            if greeting is None or greeting.get("nonce") != hello["nonce"]:
                return None
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            return decode(reader.readline(LONGEST_LINE))


def _read(answer: dict[str, Any]) -> Roll:
    if "error" in answer:
        found, expected, fix = answer["error"]
        raise repeated(found, expected, fix, answer["code"])
    entries, addresses, port = answer["roll"]
    return call_roll(tuple(entries), tuple(addresses), port)
