"""Thousands of simulated ranks in one process, with the client side of the rendezvous only."""

import random
import selectors
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from hpctrain.rendezvous.addresses import LOOPBACK
from hpctrain.rendezvous.messages import Credentials, Entry, decode, encode, hello

__all__ = [
    "PER_HOST",
    "Conversation",
    "Crowd",
    "client",
    "entry",
    "host_names",
    "introduction",
    "one_line",
]

PER_HOST = 8
# A source address has 28,000 ports, and those of the last minute are not free yet.
_PER_ADDRESS = 1024
# Pause before a client connects again, about as in RendezvousClient.
_PAUSE_SECONDS = 0.1
# Yields the bytes that a rank sends, and receives the bytes of the answer.
Conversation = Generator[bytes, bytes, None]


def host_names(size: int) -> tuple[str, ...]:
    """Return the names of the hosts of so many ranks."""
    return tuple(f"node{number:04d}" for number in range(size // PER_HOST))


def introduction(rank: int, size: int, common: Entry) -> str:
    """Return the text with which a rank introduces itself to rank 0."""
    node, local = divmod(rank, PER_HOST)
    own = {
        "host": f"node{node:04d}",
        "pid": random.Random(rank).randrange(1000, 4_000_000),
        "process": Credentials.challenge(),
        "address": None,
        "world": {"local_rank": local, "node_rank": node, "hosts": None},
    }
    return hello(rank, size, own, entry(rank, common))


def entry(rank: int, common: Entry) -> Entry:
    """Return the entry of a rank of a GPU cluster, with its own cores and GPU."""
    dice = random.Random(rank)
    return {
        **common,
        "gpu": str(uuid.UUID(int=dice.getrandbits(128))),
        "gpu_name": "NVIDIA H100 80GB HBM3",
        "visible": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(PER_HOST)))},
        "versions": {**common["versions"], "cuda": "13.0", "nccl": "2.28.9"},
        "network": {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "ib0"},
        "cores": f"{0xFF << 8 * (rank % PER_HOST):x}",
    }


def client(credentials: Credentials, rank: int, text: str, rosters: list[bytes]) -> Conversation:
    """Yield the messages of a rank above 0, as `RendezvousClient` sends them."""
    challenge = Credentials.challenge()
    answer = decode((yield encode({"start": credentials.start, "challenge": challenge}))) or {}
    if not credentials.proves(answer.get("proof"), "host", challenge):
        raise SystemExit(f"rank {rank} got an answer without a valid proof: {answer}")
    own = credentials.proof("client", str(answer["challenge"]), text)
    received = yield encode({"proof": own, "hello": text})
    while received.count(b"\n") < 2:
        received += yield b""
    roster = received.partition(b"\n")[2]  # behind the proof of rank 0
    if not roster.startswith(b'{"roster"'):
        raise SystemExit(f"rank {rank} did not get the roster: {roster[:500]!r}")
    if not rosters:
        rosters.append(roster)


def one_line() -> Conversation:
    """Yield one line that is as long as the first message of a client: the baseline."""
    yield encode({"start": "0" * 32, "challenge": Credentials.challenge()})


@dataclass(slots=True, eq=False)
class Caller:
    """Connection of a simulated rank, with the bytes received since its last message."""

    connection: socket.socket
    rank: int
    conversation: Conversation
    received: list[bytes] = field(default_factory=list)


class Crowd:
    """Many clients in one process; each keeps its connection until its conversation ends.

    Args:
        size: number of clients.
        conversation: function that returns the conversation of a client, by rank from 1.
        port: port of the server on the loopback address.
        window: most clients that wait for their first answer at the same time.

    Attributes:
        lost: number of connections that closed too early; the client then connects again.
    """

    def __init__(
        self, size: int, conversation: Callable[[int], Conversation], port: int, window: int
    ) -> None:
        self.size = size
        self.conversation = conversation
        self.port = port
        self.network = f"127.{random.randrange(1, 255)}.{random.randrange(256)}"
        self.window = window
        self.waiting = deque((0.0, rank) for rank in range(1, size + 1))  # earliest time, rank
        self.entering: set[Caller] = set()
        self.finished = self.lost = 0
        self.selector = selectors.DefaultSelector()

    def call(self, timeout: float) -> None:
        """Run the conversations of all clients.

        Raises:
            TimeoutError: a conversation has not ended after `timeout` seconds.
        """
        limit = time.monotonic() + timeout
        while self.finished < self.size:
            if (now := time.monotonic()) > limit:
                raise TimeoutError(f"{self.finished} of {self.size} clients finished")
            while self.waiting and self.waiting[0][0] <= now and len(self.entering) < self.window:
                self._connect(self.waiting.popleft()[1])
            for key, events in self.selector.select(_PAUSE_SECONDS):
                if events & selectors.EVENT_WRITE:
                    self._send_first(key.data)
                else:
                    self._receive(key.data)

    def _connect(self, rank: int) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.bind((f"{self.network}.{rank // _PER_ADDRESS}", 0))
        connection.connect_ex((LOOPBACK, self.port))
        caller = Caller(connection, rank, self.conversation(rank))
        self.entering.add(caller)
        self.selector.register(connection, selectors.EVENT_WRITE, caller)

    def _send_first(self, caller: Caller) -> None:
        self.selector.modify(caller.connection, selectors.EVENT_READ, caller)
        caller.connection.sendall(next(caller.conversation))

    def _receive(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._disconnect(caller)
            self.waiting.append((time.monotonic() + _PAUSE_SECONDS, caller.rank))
            self.lost += 1
            return
        caller.received.append(data)
        if not data.endswith(b"\n"):
            return
        line = b"".join(caller.received)
        caller.received.clear()
        try:
            caller.connection.sendall(caller.conversation.send(line))
        except StopIteration:
            self._disconnect(caller)
            self.finished += 1
        self.entering.discard(caller)  # the first answer makes room in the window

    def _disconnect(self, caller: Caller) -> None:
        self.selector.unregister(caller.connection)
        caller.connection.close()
        self.entering.discard(caller)
