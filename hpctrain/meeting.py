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

import dataclasses
import hashlib
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain import variables
from hpctrain.errors import (
    ContradictionError,
    HpctrainError,
    StartError,
    UsageError,
    repeated,
)
from hpctrain.launchers.base import MeetingPoint
from hpctrain.world import World

__all__ = ["Meeting", "Roll", "meet", "ports"]

# Below the ephemeral ranges of Linux (from 32768) and of IANA, above the well-known ports.
_PORT_RANGE = range(20000, 32000)
_PORTS_TO_TRY = 16
_LONGEST_LINE = 1 << 26
_LONGEST_HELLO = 1 << 16
_LOOPBACK = "127.0.0.1"
# A stranger on a port may accept and say nothing: then the next port is tried.
_ANSWER_SECONDS = 3.0
# The others wait a little longer than rank 0, which knows who is missing and tells them.
_GRACE_SECONDS = 5.0
_NEWS_SECONDS = 10.0

Entry = dict[str, Any]
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Roll:
    """What all ranks know after the roll call, the same on each of them.

    Attributes:
        entries: by rank, what each one said of itself ("host", "pid", and the caller's keys).
        addresses: by rank, the address by which its host is reached.
        hosts: the names of the hosts, by node rank.
        host_of_rank: by rank, the index of its host in `hosts`.
        port: of rank 0's socket for the backend's store.
    """

    entries: tuple[Entry, ...]
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]
    host_of_rank: tuple[int, ...]
    port: int


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
        roll = _call((entry,), (_LOOPBACK,), 0)
    elif world.rank == 0:
        roll, listener = _Host(world, point, nonce, entry, timeout, announce).gather()
    else:
        roll = _join(world, point, nonce, entry, timeout + _GRACE_SECONDS, announce)
    return Meeting(world.completed(roll.hosts, roll.host_of_rank), roll, nonce, listener)


def ports(point: MeetingPoint) -> list[int]:
    """The ports to try, in order: the one that was given, then those that follow from the key."""
    digest = hashlib.sha256(f"port/{point.key}".encode()).digest()
    first, stride = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big") | 1
    size = len(_PORT_RANGE)
    derived = [_PORT_RANGE[(first + i * stride) % size] for i in range(_PORTS_TO_TRY)]
    given = [point.port] if point.port else []
    return list(dict.fromkeys(given + derived))


def _places(world: World) -> dict[str, Any]:
    return {
        "local_rank": world.local_rank,
        "node_rank": world.node_rank,
        # As JSON has it, so that all rolls are equal; one rank says it for all.
        "hosts": list(world.hosts) if world.hosts and world.rank == 0 else None,
        "launcher": world.launcher,
    }


def _address(world: World, point: MeetingPoint) -> str:
    """Where rank 0 is."""
    if world.on_one_host:
        return _LOOPBACK  # nobody else needs to reach it
    if point.address:
        return point.address
    raise StartError(
        f"{world.launcher} started {world.world_size} ranks and does not say where rank 0 is",
        "its host name or address",
        f"export {variables.MAIN_ADDRESS}=HOST    (the host of rank 0, the same on all ranks)",
    )


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


@dataclass(slots=True)
class _Caller:
    """A connection to rank 0: a rank, or a stranger until it has shown the nonce."""

    connection: socket.socket
    heard: bytearray = field(default_factory=bytearray)
    rank: int | None = None


class _Host:
    """Rank 0: listens, counts, tells."""

    def __init__(
        self,
        world: World,
        point: MeetingPoint,
        nonce: str,
        entry: Entry,
        timeout: float,
        announce: Announce,
    ) -> None:
        self.world = world
        self.nonce = nonce
        self.timeout = timeout
        self.announce = announce
        self.entries: dict[int, Entry] = {0: entry}
        self.callers: dict[int, _Caller] = {}
        self.selector = selectors.DefaultSelector()
        self.listener = _listen(_address(world, point), ports(point))
        self.selector.register(self.listener, selectors.EVENT_READ, None)

    def gather(self) -> tuple[Roll, socket.socket]:
        """The roll, and the socket for the backend's store."""
        try:
            self._wait()
            roll = _call(self._in_order(), self._addresses(), 0)
            first = roll.addresses[0]
            family = socket.AF_INET6 if ":" in first else socket.AF_INET
            listener = socket.create_server((first, 0), family=family, backlog=4096)
            roll = dataclasses.replace(roll, port=listener.getsockname()[1])
            self._tell({"roll": [roll.entries, roll.addresses, roll.port]})
        except HpctrainError as error:
            fields = [error.found, error.expected, error.fix]
            self._tell({"error": fields, "code": error.exit_code})
            raise
        finally:
            for key in list(self.selector.get_map().values()):
                if key.data is not None:
                    key.data.connection.close()
            self.listener.close()
            self.selector.close()
        return roll, listener

    def _wait(self) -> None:
        started = time.monotonic()
        news = started + _NEWS_SECONDS
        while len(self.entries) < self.world.world_size:
            now = time.monotonic()
            if now >= started + self.timeout:
                raise self._missing()
            if now >= news:
                waiting = _ranks(sorted(set(range(self.world.world_size)) - set(self.entries)))
                self.announce(
                    f"waiting for {waiting} of {self.world.world_size} since {now - started:.0f} s"
                )
                news = now + _NEWS_SECONDS
            for key, _ in self.selector.select(min(news, started + self.timeout) - now):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return  # it left before it was let in
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ, _Caller(connection))

    def _hear(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.heard += data
        line, newline, _ = bytes(caller.heard).partition(b"\n")
        if caller.rank is None and newline:
            self._welcome(caller, line)
        elif not data or len(caller.heard) > _LONGEST_HELLO:
            self._dismiss(caller)

    def _welcome(self, caller: _Caller, line: bytes) -> None:
        hello = _parse(line)
        if hello is None or not hmac.compare_digest(
            str(hello.get("nonce")).encode(errors="replace"), self.nonce.encode()
        ):
            self._dismiss(caller)
            return
        rank, entry = hello["rank"], hello["entry"]
        try:
            # Within the socket's buffer, so it does not block.
            caller.connection.sendall(_line({"nonce": self.nonce}))
        except OSError:
            self._dismiss(caller)
            return
        caller.rank = rank
        self._check(hello, self.entries.get(rank))
        if rank in self.callers:
            self.callers[rank].rank = None  # the same process came again
        self.callers[rank] = caller
        self.entries[rank] = entry

    def _check(self, hello: dict[str, Any], known: Entry | None) -> None:
        rank, entry = hello["rank"], hello["entry"]
        if hello["world_size"] != self.world.world_size:
            raise ContradictionError(
                f"rank {rank} on {entry['host']} says {hello['world_size']} ranks, rank 0 on "
                f"{self.entries[0]['host']} says {self.world.world_size}",
                "one world size",
                "hpctrain explain    on both shows the variables",
            )
        if known and (known["host"], known["pid"]) != (entry["host"], entry["pid"]):
            raise ContradictionError(
                f"two processes say that they are rank {rank}: {known['host']} pid "
                f"{known['pid']} and {entry['host']} pid {entry['pid']}",
                "each rank once",
                "start each rank once, and give every start a port of its own "
                f"(MASTER_PORT or {variables.MAIN_PORT})",
            )

    def _dismiss(self, caller: _Caller) -> None:
        self.selector.unregister(caller.connection)
        caller.connection.close()
        if caller.rank is not None:
            self.callers.pop(caller.rank, None)
            self.entries.pop(caller.rank, None)

    def _tell(self, message: dict[str, Any]) -> None:
        line = _line(message)
        # Also to those who are counted nowhere, because they are what is wrong.
        callers = [key.data for key in self.selector.get_map().values() if key.data is not None]
        for caller in callers:
            if caller.rank is None:
                continue
            try:
                caller.connection.settimeout(_GRACE_SECONDS)
                caller.connection.sendall(line)
            except OSError:
                continue  # it died; the backend's own time-out names it

    def _missing(self) -> StartError:
        missing = sorted(set(range(self.world.world_size)) - set(self.entries))
        came = ", ".join(f"{r} on {self.entries[r]['host']}" for r in sorted(self.entries)[:32])
        return StartError(
            f"{_ranks(missing)} of {self.world.world_size} did not come within "
            f"{self.timeout:.0f} s (came: {came})",
            "all ranks",
            "look for the first error in their logs; a slow file system needs a longer "
            "--start-timeout",
        )

    def _in_order(self) -> tuple[Entry, ...]:
        return tuple(self.entries[rank] for rank in range(self.world.world_size))

    def _addresses(self) -> tuple[str, ...]:
        """By rank. Rank 0's host has the address by which the first rank elsewhere reached it."""
        home = self.entries[0]["host"]
        own = _LOOPBACK
        for rank in range(1, self.world.world_size):
            if self.entries[rank]["host"] != home:
                own = _plain(self.callers[rank].connection.getsockname()[0])
                break
        return tuple(
            own
            if rank == 0 or self.entries[rank]["host"] == home
            else _plain(self.callers[rank].connection.getpeername()[0])
            for rank in range(self.world.world_size)
        )


def _listen(address: str, candidates: Sequence[int]) -> socket.socket:
    """A socket on the first free port: for this host alone where that is enough."""
    last: OSError | None = None
    for port in candidates:
        try:
            if _is_loopback(address):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                server = socket.create_server((address, port), family=family, backlog=4096)
            elif socket.has_dualstack_ipv6():
                server = socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
                )
            else:
                server = socket.create_server(("", port), backlog=4096)
        except OSError as error:
            last = error
            continue
        server.setblocking(False)
        return server
    raise StartError(
        f"rank 0 can listen on none of the ports {', '.join(map(str, candidates))} ({last})",
        "one free port",
        f"export {variables.MAIN_PORT}=PORT    (a free one on the host of rank 0)",
    )


def _join(
    world: World,
    point: MeetingPoint,
    nonce: str,
    entry: Entry,
    timeout: float,
    announce: Announce,
) -> Roll:
    """A rank above 0: find rank 0, say who I am, wait for the roll."""
    address = _address(world, point)
    candidates = ports(point)
    hello = {"nonce": nonce, "rank": world.rank, "world_size": world.world_size, "entry": entry}
    started = time.monotonic()
    news = started + _NEWS_SECONDS
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
            news += _NEWS_SECONDS
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
        connection.sendall(_line(hello))
        with connection.makefile("rb") as reader:
            greeting = _parse(reader.readline(_LONGEST_HELLO))
            if greeting is None or greeting.get("nonce") != hello["nonce"]:
                return None
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            return _parse(reader.readline(_LONGEST_LINE))


def _read(answer: dict[str, Any]) -> Roll:
    if "error" in answer:
        found, expected, fix = answer["error"]
        raise repeated(found, expected, fix, answer["code"])
    entries, addresses, port = answer["roll"]
    return _call(tuple(entries), tuple(addresses), port)


def _call(entries: tuple[Entry, ...], addresses: tuple[str, ...], port: int) -> Roll:
    """The roll from what each rank said; every rank comes to the same one.

    Raises:
        ContradictionError: two ranks of one host have the same local rank.
        HpctrainError: the error that a rank brought, the lowest rank's first.
    """
    for rank, entry in enumerate(entries):
        if "error" in entry:
            found, expected, fix = entry["error"]
            kind = UsageError if entry["code"] == UsageError.exit_code else StartError
            where = f"rank {rank} on {entry['host']}: " if len(entries) > 1 else ""
            raise kind(where + found, expected, fix)
    places = [entry["world"] for entry in entries]
    # The names and numbers of the launcher count where every rank has them.
    if all(p["node_rank"] is not None for p in places):
        host_of_rank = tuple(p["node_rank"] for p in places)
        names = [entries[host_of_rank.index(node)]["host"] for node in sorted(set(host_of_rank))]
        hosts = tuple(places[0]["hosts"] or names)
    else:
        names = [entry["host"] for entry in entries]
        hosts = tuple(dict.fromkeys(names))
        host_of_rank = tuple(hosts.index(name) for name in names)
    seen: dict[tuple[int, int], int] = {}
    for rank, (place, host) in enumerate(zip(places, host_of_rank, strict=True)):
        other = seen.setdefault((host, place["local_rank"]), rank)
        if other != rank:
            raise ContradictionError(
                f"ranks {other} and {rank} both have local rank {place['local_rank']} on "
                f"{hosts[host]}",
                "a local rank of its own for each rank of a host",
                "export LOCAL_RANK as the place of the rank on its host, from 0",
            )
        if place["local_rank"] >= host_of_rank.count(host):
            raise ContradictionError(
                f"rank {rank} has local rank {place['local_rank']}, and there are only "
                f"{host_of_rank.count(host)} ranks on {hosts[host]}",
                "local ranks that count the ranks of one host",
                "export LOCAL_RANK as the place of the rank on its host, from 0",
            )
    return Roll(entries, addresses, hosts, host_of_rank, port)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5`."""
    shown = ", ".join(map(str, ranks[:32])) + (", …" if len(ranks) > 32 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _plain(address: str) -> str:
    """An IPv4 address that came over an IPv6 socket, as IPv4."""
    return address.removeprefix("::ffff:")


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """A message, or None for anything that is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
