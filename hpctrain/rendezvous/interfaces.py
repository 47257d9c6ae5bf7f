"""The network interfaces of this host and their addresses."""

import socket

from hpctrain.cluster import system
from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.errors import UsageError

__all__ = ["address_on", "addresses", "interface_of", "reachable"]

_LINK_LOCAL = "20"  # the scope in Linux's table: an address that is valid on one link only
# Default name prefixes of bridges and other interfaces inside a host: often with the same address
# on every host.
_INSIDE = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc", "lxd", "vmnet")


def addresses() -> dict[str, list[str]]:
    """Return the addresses by interface, IPv4 before IPv6, without link-local ones."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        if (own := system.interface_address(name)) is not None:
            found.setdefault(name, []).append(own)
    for line in system.ipv6_table().splitlines():
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
