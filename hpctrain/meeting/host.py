"""Rank 0's side: it listens, counts and tells."""

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain import variables
from hpctrain.errors import ContradictionError, HpctrainError, StartError
from hpctrain.launchers.base import MeetingPoint
from hpctrain.meeting.boards import Board
from hpctrain.meeting.guest import keep_alive
from hpctrain.meeting.interfaces import is_loopback, reachable
from hpctrain.meeting.messages import (
    GRACE_SECONDS,
    LONGEST_GREETING,
    LONGEST_HELLO,
    NEWS_SECONDS,
    Announce,
    Credentials,
    Entry,
    decode,
    encode,
    pack,
)
from hpctrain.meeting.place import LOOPBACK, hosts_to_ask, ports
from hpctrain.meeting.roll import Roll, call_roll
from hpctrain.world import World

__all__ = ["Host"]

# Strangers who say nothing are sent away after this, and the oldest of them when there are many.
_STRANGER_SECONDS = 10.0
_STRANGERS = 256


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection to rank 0: a rank, or a stranger until it has proved that it is one."""

    connection: socket.socket
    came: float
    peer: str  # its address, and the one that it called
    own: str
    heard: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    challenge: str = ""
    rank: int | None = None
    has_heard: bool = False


class Host:
    """Rank 0: listens, counts, tells.

    Args:
        world, point: as its launcher has it.
        credentials: of this start.
        entry: what to tell the others.
        board: where to leave word, or None.
        timeout: seconds until those who have not come are named.
        announce: called with a line for people when waiting takes long.
        check: what is done with the roll before anybody else gets it; what it raises is told to
            all.
    """

    def __init__(
        self,
        world: World,
        point: MeetingPoint,
        credentials: Credentials,
        entry: Entry,
        board: Board | None,
        timeout: float,
        announce: Announce,
        check: Callable[[Roll], None],
    ) -> None:
        self.world = world
        self.credentials = credentials
        self.board = board
        self.timeout = timeout
        self.announce = announce
        self.check = check
        self.nonce = Credentials.challenge()
        self.entries: dict[int, Entry] = {0: entry}
        self.callers: dict[int, _Caller] = {}
        # Ranks too, until they have said who they are; all of them may call at once.
        self.most_strangers = _STRANGERS + world.world_size
        self.strangers: dict[_Caller, None] = {}  # a dict keeps the order in which they came
        self.lost: dict[int, str] = {}  # ranks that came and went, and their hosts
        self.selector = selectors.DefaultSelector()
        self.listener = listen(hosts_to_ask(world, point), ports(point), entry["host"])
        self.selector.register(self.listener, selectors.EVENT_READ, None)

    def gather(self, own_listener: bool) -> tuple[Roll, str, socket.socket | None]:
        """The roll, the nonce, and the socket for the backend's store.

        Args:
            own_listener: whether the backend needs one.
        """
        listener = None
        try:
            self._leave_word()
            self._wait()
            addresses = self._addresses()
            if own_listener:
                family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
                listener = socket.create_server((addresses[0], 0), family=family, backlog=4096)
            port = listener.getsockname()[1] if listener else 0
            entries = tuple(self.entries[rank] for rank in range(self.world.world_size))
            roll = call_roll(entries, addresses, port)
            self.check(roll)
            self._tell(
                {"roll": pack(entries), "addresses": addresses, "port": port, "nonce": self.nonce}
            )
        except HpctrainError as error:
            self._deliver(
                {"error": [error.found, error.expected, error.fix], "code": error.exit_code}
            )
            if listener:
                listener.close()
            raise
        finally:
            if self.board is not None:
                self.board.clear(self.credentials.start)
            for key in list(self.selector.get_map().values()):
                if key.data is not None:
                    key.data.connection.close()
            self.listener.close()
            self.selector.close()
        return roll, self.nonce, listener

    def _leave_word(self) -> None:
        """Tell the board where this is."""
        if self.board is None:
            return
        own = [LOOPBACK] if self.world.on_one_host else [*reachable(), LOOPBACK]
        word = {"addresses": own, "port": self.listener.getsockname()[1]}
        try:
            self.board.write(self.credentials.start, json.dumps(word).encode())
        except OSError as error:
            raise StartError(
                f"rank 0 cannot leave word of its address in {self.board.where}: {error}",
                "a place that all ranks see, or rank 0's host by name",
                f"export {variables.MAIN_ADDRESS}=HOST    (the host of rank 0, on all ranks)",
            ) from None

    def _wait(self) -> None:
        started = time.monotonic()
        news = started + NEWS_SECONDS
        while len(self.entries) < self.world.world_size:
            now = time.monotonic()
            if now >= started + self.timeout:
                raise self._missing()
            if now >= news:
                waiting = _ranks(self._absent())
                self.announce(
                    f"waiting for {waiting} of {self.world.world_size} since {now - started:.0f} s"
                )
                news = now + NEWS_SECONDS
            self._attend(min(news, started + self.timeout) - now)

    def _attend(self, seconds: float) -> None:
        """Go on with whoever has something to say or to hear, within some seconds."""
        for key, events in self.selector.select(max(0.0, seconds)):
            if key.data is None:
                self._accept()
            elif events & selectors.EVENT_WRITE:
                self._send(key.data)
            else:
                self._hear(key.data)
        limit = time.monotonic() - _STRANGER_SECONDS
        for stranger in list(self.strangers):
            if stranger.came > limit and len(self.strangers) <= self.most_strangers:
                break
            self._dismiss(stranger)

    def _accept(self) -> None:
        try:
            connection, peer = self.listener.accept()
            own = connection.getsockname()
        except OSError:
            # It left before it was let in; or there is room for no more files.
            for stranger in list(self.strangers)[:1]:
                self._dismiss(stranger)
            return
        connection.setblocking(False)
        caller = _Caller(connection, time.monotonic(), _plain(peer[0]), _plain(own[0]))
        self.strangers[caller] = None
        self.selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.heard += data
        line, newline, rest = bytes(caller.heard).partition(b"\n")
        if newline:
            caller.heard = bytearray(rest)
            self._understand(caller, line)
        elif not data or len(caller.heard) > (
            LONGEST_HELLO if caller.challenge else LONGEST_GREETING
        ):
            self._dismiss(caller)

    def _understand(self, caller: _Caller, line: bytes) -> None:
        """A greeting, a hello, or that the roll was heard."""
        said = decode(line) or {}
        if caller.rank is not None:
            caller.has_heard = "heard" in said
        elif caller.challenge:
            self._welcome(caller, said)
        elif said.get("start") == self.credentials.start and "challenge" in said:
            caller.challenge = Credentials.challenge()
            proof = self.credentials.proof("host", str(said["challenge"]))
            answer = {"start": said["start"], "proof": proof, "challenge": caller.challenge}
            self._queue(caller, encode(answer))
        else:
            self._dismiss(caller)

    def _welcome(self, caller: _Caller, said: dict[str, Any]) -> None:
        """Count a caller who proves that it belongs to this start."""
        hello = str(said.get("hello"))
        if not self.credentials.proves(said.get("proof"), "guest", caller.challenge, hello):
            self._dismiss(caller)
            return
        try:
            rank, size, entry = _read(hello)
            keep_alive(caller.connection)
        except (ValueError, OSError):
            self._dismiss(caller)
            return
        self.strangers.pop(caller, None)
        caller.rank = rank
        self._check_place(rank, size, entry)
        if rank in self.callers:
            self.callers[rank].rank = None  # the same process came again
        self.callers[rank] = caller
        self.entries[rank] = entry
        self.lost.pop(rank, None)

    def _check_place(self, rank: int, size: int, entry: Entry) -> None:
        known = self.entries.get(rank)
        if size != self.world.world_size:
            raise ContradictionError(
                f"rank {rank} on {entry['host']} says {size} ranks, rank 0 on "
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
        self.strangers.pop(caller, None)
        if caller.rank is not None:
            self.callers.pop(caller.rank, None)
            entry = self.entries.pop(caller.rank, None)
            if entry:
                self.lost[caller.rank] = entry["host"]

    def _tell(self, message: dict[str, Any]) -> None:
        """Give all ranks the roll; go on when all have heard it, so that nobody was lost since.

        Raises:
            StartError: naming the ranks that did not hear it.
        """
        patience = GRACE_SECONDS + self.world.world_size / 500
        self._deliver(message, patience, heard=True)
        deaf = [r for r in range(1, self.world.world_size) if not self._heard(r)]
        if deaf:
            hosts = dict.fromkeys(self.lost.get(r) or self.entries[r]["host"] for r in deaf)
            raise StartError(
                f"{_ranks(deaf)} of {self.world.world_size} came and did not hear the roll within "
                f"{patience:.0f} s (on {', '.join(list(hosts)[:8])})",
                "all ranks, to the end of the start",
                "look for the first error in their logs, and whether the host can be reached",
            )
        self._deliver({"begin": True}, patience)

    def _heard(self, rank: int) -> bool:
        return rank in self.callers and self.callers[rank].has_heard

    def _deliver(
        self, message: dict[str, Any], patience: float = GRACE_SECONDS, heard: bool = False
    ) -> None:
        """Send a message to all ranks, also to one that is counted nowhere, as it is what is wrong.

        Args:
            message: to send.
            patience: seconds until it is given up for those who do not take it.
            heard: wait until they say that they have it.
        """
        line = encode(message)
        keys = list(self.selector.get_map().values())
        callers = [key.data for key in keys if key.data is not None and key.data.rank is not None]
        for caller in callers:
            self._queue(caller, line)
        limit = time.monotonic() + patience
        while callers and time.monotonic() < limit:
            last = callers[-1]
            owes = last.unsent or (heard and not last.has_heard)
            if owes and last.connection.fileno() >= 0:
                self._attend(limit - time.monotonic())
            else:
                callers.pop()  # who is done stays done: nobody is looked at again

    def _queue(self, caller: _Caller, line: bytes) -> None:
        """Send as much as the connection takes, and the rest when it takes more."""
        caller.unsent = memoryview(bytes(caller.unsent) + line)
        self._send(caller)

    def _send(self, caller: _Caller) -> None:
        try:
            sent = caller.connection.send(caller.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._dismiss(caller)
            return
        caller.unsent = caller.unsent[sent:]
        more = selectors.EVENT_WRITE if caller.unsent else 0
        self.selector.modify(caller.connection, selectors.EVENT_READ | more, caller)

    def _absent(self) -> list[int]:
        return sorted(set(range(self.world.world_size)) - set(self.entries))

    def _missing(self) -> StartError:
        missing = self._absent()
        came = ", ".join(f"{r} on {self.entries[r]['host']}" for r in sorted(self.entries)[:32])
        gone = "".join(f"; rank {r} on {h} came and was lost" for r, h in self.lost.items())
        seen = {entry["host"] for entry in self.entries.values()} | set(self.lost.values())
        silent = [host for host in self.world.hosts or () if host not in seen]
        if silent:
            gone += f"; nothing was heard from {', '.join(silent[:8])}"
        return StartError(
            f"{_ranks(missing)} of {self.world.world_size} did not come within "
            f"{self.timeout:.0f} s (came: {came}{gone}). Rank 0 listened at port "
            f"{self.listener.getsockname()[1]} of {self.entries[0]['host']}",
            "all ranks",
            "look for the first error in their logs; a slow file system needs a longer "
            "--start-timeout",
        )

    def _addresses(self) -> tuple[str, ...]:
        """By rank: of the interface that was asked for, else by which the ranks reached rank 0."""
        home = self.entries[0]["host"]
        own = self.entries[0]["address"] or LOOPBACK
        for rank in range(1, self.world.world_size):
            if self.entries[rank]["host"] != home and not self.entries[0]["address"]:
                own = self.callers[rank].own
                break
        return tuple(
            own
            if rank == 0 or self.entries[rank]["host"] == home
            else self.entries[rank]["address"] or self.callers[rank].peer
            for rank in range(self.world.world_size)
        )


def listen(hosts: Sequence[str], candidates: Sequence[int], own: str) -> socket.socket:
    """A socket on the first free port: for this host alone where that is enough.

    Args:
        hosts: where the others look for rank 0.
        candidates: ports.
        own: this host's name, for people.

    Raises:
        StartError: no port is free.
    """
    last: OSError | None = None
    for port in candidates:
        try:
            if len(hosts) == 1 and is_loopback(hosts[0]):
                family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
                server = socket.create_server((hosts[0], port), family=family, backlog=4096)
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
        f"rank 0 can listen on none of the ports {', '.join(map(str, candidates))} of {own} "
        f"({last})",
        "a free port: another start may have taken this one"
        if len(candidates) == 1
        else "one free port",
        f"export {variables.MAIN_PORT if len(candidates) > 1 else 'MASTER_PORT'}=PORT    (a free "
        "one on the host of rank 0, the same on all ranks)",
    )


def _read(hello: str) -> tuple[int, int, Entry]:
    """Rank, world size and entry.

    Raises:
        ValueError: it is something else.
    """
    said = json.loads(hello)
    if not isinstance(said, list) or [type(part) for part in said] != [int, int, dict]:
        raise ValueError(hello)
    rank, size, entry = said
    place = entry.get("world")
    whole = {"host", "pid", "address"} <= entry.keys() and isinstance(place, dict)
    if not 0 < rank < size or not whole or not {"local_rank", "node_rank"} <= place.keys():
        raise ValueError(hello)
    return rank, size, entry


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5`."""
    shown = ", ".join(map(str, ranks[:32])) + (", …" if len(ranks) > 32 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _plain(address: str) -> str:
    """An IPv4 address that came over an IPv6 socket, as IPv4."""
    return address.removeprefix("::ffff:")
