"""Checks of this host's network interfaces and of the addresses of its name."""

import socket
from collections.abc import Mapping, Sequence

from hpctrain.cluster.launchers.base import is_loopback
from hpctrain.cluster.texts import printable
from hpctrain.rendezvous import interfaces
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.subprocesses import SECONDS, within

__all__ = ["examine", "judge_interfaces", "judge_name"]


def examine() -> list[Finding]:
    """Check the interfaces and the name of this host."""
    name = socket.gethostname()
    answer = within(SECONDS, lambda: _resolve(name))
    found = interfaces.addresses()
    return [judge_interfaces(found), judge_name(name, answer, interfaces.reachable())]


def _resolve(name: str) -> list[str] | str:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "not a valid host name"
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def judge_interfaces(found: Mapping[str, Sequence[str]]) -> Finding:
    """Return a finding with the addresses, and whether one of them leads to other hosts.

    Args:
        found: addresses of each interface, by its name.
    """
    text = "; ".join(f"{name} {' '.join(own)}" for name, own in found.items())
    if all(is_loopback(address) for own in found.values() for address in own):
        # No warning: a start on one host needs no other host.
        text = f"{text or 'none'}: no other host can be reached"
    return Finding("interfaces", OK, text)


def judge_name(name: str, answer: Sequence[str] | str | None, reachable: Sequence[str]) -> Finding:
    """Return a finding on whether the host's own name resolves, and to which addresses.

    Args:
        name: name of the host.
        answer: addresses of the name, or the error; None without an answer in time.
        reachable: addresses of this host without loopback.
    """
    name = printable(name)
    own = reachable[0] if reachable else "127.0.0.1"
    if answer is None:
        found = f"{name}: no answer within {SECONDS:.0f} s"
        fix = "look at /etc/resolv.conf for a name server that does not respond"
        return Finding("host name", WARNING, found, (fix,))
    if isinstance(answer, str):
        fix = f"as root: echo '{own} {name}' >> /etc/hosts"
        return Finding("host name", PROBLEM, f"{name} does not resolve: {answer}", (fix,))
    found = f"{name} is {', '.join(answer)}"
    if answer and all(is_loopback(address) for address in answer):
        found += ": loopback only; hpctrain uses the address at which the ranks reached this host"
    return Finding("host name", OK, found)
