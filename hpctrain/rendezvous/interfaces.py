"""The network interfaces of this host and their addresses. Linux, no torch."""

import fcntl
import socket
import struct
from pathlib import Path

from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.errors import UsageError

__all__ = ["address_on", "addresses", "interface_of", "reachable"]

_SIOCGIFADDR = 0x8915  # the request for an interface's IPv4 address, linux/sockios.h
_IPV6_TABLE = Path("/proc/net/if_inet6")
_LINK_LOCAL = "20"  # the scope in that table: an address that is valid on one link only
# Default name prefixes of bridges and other interfaces inside a host: often with the same address
# on every host.
_INSIDE = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc", "lxd", "vmnet")


def addresses() -> dict[str, list[str]]:
    """Return the addresses by interface, IPv4 before IPv6, without link-local ones."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            found.setdefault(name, []).append(socket.inet_ntoa(answer[20:24]))
    try:
        table = _IPV6_TABLE.read_text()
    except OSError:
        table = ""
    for line in table.splitlines():
        packed, _, _, scope, _, name = line.split()
        if scope != _LINK_LOCAL:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
            found.setdefault(name, []).append(address)
    return found


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, or None."""
    plain = address.partition("%")[0]
    return next((name for name, own in addresses().items() if plain in own), None)


def address_on(name: str) -> str:
    """Return the first address of an interface.

    Raises:
        UsageError: there is no such interface, or it has no address.
    """
    found = addresses()
    if name not in found:
        available = ", ".join(f"{n} ({', '.join(a)})" for n, a in found.items())
        if name in [other for _, other in socket.if_nameindex()]:
            raise UsageError("HT207.interface-without-address", name=name, available=available)
        raise UsageError("HT207.no-such-interface", name=name, available=available)
    return found[name][0]


def reachable() -> list[str]:
    """Return this host's addresses; those that other hosts can most likely reach are first."""
    found = addresses()
    own = [
        (name.startswith(_INSIDE), address)
        for name, address_list in found.items()
        for address in address_list
        if not is_loopback(address)
    ]
    return [address for _, address in sorted(own, key=lambda pair: pair[0])]
