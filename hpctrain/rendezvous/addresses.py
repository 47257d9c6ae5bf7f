"""Addresses where rank 0 may listen, and a few ports that are derived from the start's key."""

import hashlib
import socket
from collections.abc import Iterator, Sequence

from hpctrain.cluster.launchers.base import RendezvousPoint, is_loopback
from hpctrain.cluster.world import World

__all__ = ["LOOPBACK", "Names", "candidate_hosts", "listen", "open_listener", "ports"]

# Below the ephemeral ranges of Linux (from 32768) and of IANA, above the well-known ports.
_PORT_RANGE = range(20000, 32000)
_PORTS_TO_TRY = 16
LOOPBACK = "127.0.0.1"
_BACKLOG = 4096  # connections that wait to be accepted


def ports(point: RendezvousPoint) -> list[int]:
    """Return the ports to try, in order: the given one, then those derived from the key."""
    if point.only_port and point.port:
        return [point.port]
    digest = hashlib.sha256(f"port/{point.key}".encode(errors="surrogateescape")).digest()
    first, stride = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big") | 1
    size = len(_PORT_RANGE)
    derived = [_PORT_RANGE[(first + i * stride) % size] for i in range(_PORTS_TO_TRY)]
    given = [point.port] if point.port else []
    return list(dict.fromkeys(given + derived))


def candidate_hosts(world: World, point: RendezvousPoint) -> tuple[str, ...]:
    """Return the names or addresses of the hosts where rank 0 may run, the likeliest first."""
    if world.on_one_host:
        return (LOOPBACK,)  # no other host has to reach rank 0
    likely = (point.address,) if point.address else ()
    return tuple(dict.fromkeys((*likely, *point.others)))


def open_listener(address: str | None, port: int) -> socket.socket:
    """Open a listening socket.

    Args:
        address: address of this host; None for all of its addresses.
        port: port, or 0 for one that is free.

    Raises:
        OSError: the port is in use.
    """
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


def listen(
    hosts: Sequence[str], candidates: Sequence[int]
) -> tuple[socket.socket | None, list[tuple[str, int]], str]:
    """Open a socket on the first free port, for this host alone if that is enough.

    Args:
        hosts: hosts on which the other ranks look for rank 0.
        candidates: ports to try, in order.

    Returns:
        the socket, or None if no port is free; the places that are in use; and the error of the
        last one.
    """
    error_text = ""
    alone = hosts[0] if len(hosts) == 1 and is_loopback(hosts[0]) else None
    taken: list[tuple[str, int]] = []
    for port in candidates:
        try:
            return open_listener(alone, port), taken, error_text
        except OSError as error:
            error_text = str(error)
            taken.append((alone or LOOPBACK, port))
    return None, taken, error_text


class Names:
    """Resolver of host names, with the reason for each name that has no usable address.

    Args:
        own: name of this host.
        simulated: whether this host simulates several hosts, so that loopback reaches all of them.
    """

    def __init__(self, own: str, simulated: bool) -> None:
        self._own = _short(own)
        self._simulated = simulated
        self._known: dict[str, Sequence[str]] = {}
        self.wrong: dict[str, str] = {}

    def resolve(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield each name with each of its addresses. A name that failed is resolved again."""
        for name in names:
            if name not in self._known:
                found = self._look_up(name)
                if not found:
                    continue
                self._known[name] = found
            yield from ((name, address) for address in self._known[name])

    def _look_up(self, name: str) -> Sequence[str]:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: invalid name
            reason = getattr(error, "strerror", None) or error
            self.wrong[name] = f"{name} does not resolve: {reason}"
            return ()
        found = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        if all(address.lower().startswith("fe80:") for address in found):
            self.wrong[name] = f"{name} is a link-local address, which no other host can use"
            return ()
        beyond = [address for address in found if not is_loopback(address)]
        if beyond or self._simulated or is_loopback(name) or _short(name) == self._own:
            self.wrong.pop(name, None)
            return beyond or found
        # Another host may resolve its own name to loopback; here that address is this host.
        self.wrong[name] = f"{name} resolves to {', '.join(found)}, which is this host"
        return ()


def _short(name: str) -> str:
    return name.partition(".")[0].lower()
