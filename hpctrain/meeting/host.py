"""Rank 0's side: it listens, counts and tells."""

import dataclasses
import hmac
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain import variables
from hpctrain.errors import ContradictionError, HpctrainError, StartError
from hpctrain.launchers.base import MeetingPoint
from hpctrain.meeting.messages import (
    GRACE_SECONDS,
    LONGEST_HELLO,
    NEWS_SECONDS,
    Announce,
    Entry,
    decode,
    encode,
)
from hpctrain.meeting.place import LOOPBACK, address_of, ports
from hpctrain.meeting.roll import Roll, call_roll
from hpctrain.world import World

__all__ = ["Host"]


@dataclass(slots=True)
class _Caller:
    """A connection to rank 0: a rank, or a stranger until it has shown the nonce."""

    connection: socket.socket
    heard: bytearray = field(default_factory=bytearray)
    rank: int | None = None


class Host:
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
        self.listener = listen(address_of(world, point), ports(point))
        self.selector.register(self.listener, selectors.EVENT_READ, None)

    def gather(self) -> tuple[Roll, socket.socket]:
        """The roll, and the socket for the backend's store."""
        try:
            self._wait()
            roll = call_roll(self._in_order(), self._addresses(), 0)
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
        news = started + NEWS_SECONDS
        while len(self.entries) < self.world.world_size:
            now = time.monotonic()
            if now >= started + self.timeout:
                raise self._missing()
            if now >= news:
                waiting = _ranks(sorted(set(range(self.world.world_size)) - set(self.entries)))
                self.announce(
                    f"waiting for {waiting} of {self.world.world_size} since {now - started:.0f} s"
                )
                news = now + NEWS_SECONDS
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
        elif not data or len(caller.heard) > LONGEST_HELLO:
            self._dismiss(caller)

    def _welcome(self, caller: _Caller, line: bytes) -> None:
        hello = decode(line)
        if hello is None or not hmac.compare_digest(
            str(hello.get("nonce")).encode(errors="replace"), self.nonce.encode()
        ):
            self._dismiss(caller)
            return
        rank, entry = hello["rank"], hello["entry"]
        try:
            # Within the socket's buffer, so it does not block.
            caller.connection.sendall(encode({"nonce": self.nonce}))
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
        line = encode(message)
        # Also to those who are counted nowhere, because they are what is wrong.
        callers = [key.data for key in self.selector.get_map().values() if key.data is not None]
        for caller in callers:
            if caller.rank is None:
                continue
            try:
                caller.connection.settimeout(GRACE_SECONDS)
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
        own = LOOPBACK
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


def listen(address: str, candidates: Sequence[int]) -> socket.socket:
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


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5`."""
    shown = ", ".join(map(str, ranks[:32])) + (", …" if len(ranks) > 32 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _plain(address: str) -> str:
    """An IPv4 address that came over an IPv6 socket, as IPv4."""
    return address.removeprefix("::ffff:")
