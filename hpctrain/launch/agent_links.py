"""Connections between `hpctrain run` and the agents of a job, which last as long as the job.

Each side proves that it has the secret of the launch, as in the rendezvous (`Credentials`). Then
both send lines of JSON, each with a proof over its number and text, so that nobody can add, repeat
or change one:

    agent → supervisor   {"start": …, "challenge": …}
    supervisor → agent   {"start": …, "proof": …, "challenge": …}
    agent → supervisor   {"proof": …, "hello": "TEXT"}
    both                 {"proof": …, "text": "TEXT"}

TEXT is a JSON object; `agent` lists them. A connection that ends, for whatever reason, ends the
ranks of the host. The kernel of a lost host does not answer: TCP's keep-alive shows that. It
answers for a process that is suspended or busy, which is no loss. The agent gives up first, so its
ranks have ended when the supervisor calls the host lost.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.errors import StartError
from hpctrain.rendezvous.addresses import open_listener
from hpctrain.rendezvous.interfaces import reachable
from hpctrain.rendezvous.messages import Credentials, decode, encode, keep_alive

__all__ = ["AgentLinks", "Link", "connect"]

# The agent kills its ranks after the first of them; then the supervisor calls the host lost.
SECONDS_OF_AGENT = 8
SECONDS_TO_DETECT = 10
_INTERVAL = 1
_SECONDS_TO_SEND = 5.0
_SECONDS_TO_GREET = 10.0
_SECONDS_FOR_A_PLACE = 2.0
_PAUSE = 0.2
_MOST_UNKNOWN = 256
_CHUNK = 1 << 16
_LONGEST_HELLO = 1 << 16
_LONGEST_LINE = 1 << 26

Place = tuple[str, int]
Message = dict[str, Any]
# What happened on a link: a message of the agent, "hello" first; None at its end.
Received = tuple["Link", Message | None]


class Link:
    """One side of a connection, after both sides have proved that they belong to the launch.

    Args:
        connection: its socket.
        credentials: credentials of the launch.
        challenges: challenges of both sides, the agent's first.
        sends, receives: names of the two directions, for the proofs.

    Attributes:
        address: address of the other side.
        host: name of the host of the agent, once the supervisor knows it.
    """

    def __init__(
        self,
        connection: socket.socket,
        credentials: Credentials,
        challenges: str,
        sends: str,
        receives: str,
    ) -> None:
        self.connection = connection
        self.address = _plain(connection.getpeername()[0])
        self.host = ""
        self._credentials, self._challenges = credentials, challenges
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0
        self._lock = threading.Lock()
        self.rest = b""

    def send(self, **message: Any) -> bool:
        """Send a message; return whether the connection has taken it."""
        text = json.dumps(message)
        with self._lock:
            self._sent += 1
            numbered = f"{self._challenges} {self._sent}"
            proof = self._credentials.proof(self._sends, numbered, text)
            try:
                self.connection.settimeout(_SECONDS_TO_SEND)
                self.connection.sendall(encode({"proof": proof, "text": text}))
            except OSError:
                self.end()
                return False
        return True

    def read(self, line: bytes) -> Message:
        """Return the message of a line.

        Raises:
            OSError: its proof is wrong.
        """
        self._received += 1
        record, numbered = decode(line), f"{self._challenges} {self._received}"
        text = str(record.get("text"))
        if not self._credentials.proves(record.get("proof"), self._receives, numbered, text):
            raise OSError("a message without a valid proof")
        return decode(text.encode())

    def receive(self) -> Message | None:
        """Wait for the next message; return None at the end of the connection."""
        try:
            self.connection.settimeout(None)
            while b"\n" not in self.rest:
                data = self.connection.recv(_CHUNK)
                if not data or len(self.rest) > _LONGEST_LINE:
                    return None
                self.rest += data
            line, _, self.rest = self.rest.partition(b"\n")
            return self.read(line)
        except OSError:
            return None

    def end(self) -> None:
        """End the connection; the thread that reads it notices, and closes it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class AgentLinks:
    """Links to all agents of a job, and the thread that reads them.

    Args:
        launch: name of the launch.
        secret: secret that only this process and the agents have.
        interface_address: address on the interface that a person has chosen; None for all.
        put: function that takes what is received; called in the thread.

    Attributes:
        places: addresses and port to which the agents connect, the likeliest first.
    """

    def __init__(
        self,
        launch: str,
        secret: str,
        interface_address: str | None,
        put: Callable[[Received], None],
    ) -> None:
        self._credentials, self._put = Credentials(launch, secret), put
        self._listener = open_listener(interface_address, 0)
        self._listener.setblocking(False)
        keep_alive(self._listener, SECONDS_TO_DETECT, _INTERVAL)
        port = self._listener.getsockname()[1]
        found = [interface_address] if interface_address else [*reachable(), "127.0.0.1"]
        self.places: list[Place] = [(address, port) for address in found]
        self._wakes, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._unknown: dict[socket.socket, _Greeting] = {}
        self._links: dict[socket.socket, Link] = {}
        self._thread = threading.Thread(target=self._serve, name="hpctrain agents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._woken.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._wakes:
                    self._end()
                    return
                if connection is self._listener:
                    self._accept()
                elif connection in self._unknown:
                    self._greet(connection)
                elif connection in self._links:
                    self._read(connection)
            now = time.monotonic()
            for connection, greeting in list(self._unknown.items()):
                if now > greeting.since + _SECONDS_TO_GREET:
                    self._dismiss(connection)

    def _end(self) -> None:
        for connection in [self._listener, self._wakes, *self._unknown, *self._links]:
            with contextlib.suppress(OSError):
                connection.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self._unknown) >= _MOST_UNKNOWN:
                self._dismiss(next(iter(self._unknown)))
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection, SECONDS_TO_DETECT, _INTERVAL)
            self._unknown[connection] = _Greeting(time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _dismiss(self, connection: socket.socket) -> None:
        self._unknown.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Converse with a peer that has not proved yet that it belongs to this launch."""
        greeting, credentials = self._unknown[connection], self._credentials
        data = _data(connection)
        if data is None:
            return
        greeting.rest += data
        if not data or len(greeting.rest) > _LONGEST_HELLO:
            self._dismiss(connection)
            return
        while b"\n" in greeting.rest:
            line, _, greeting.rest = greeting.rest.partition(b"\n")
            message = decode(line)
            if not greeting.own:
                if message.get("start") != credentials.start or "challenge" not in message:
                    self._dismiss(connection)
                    return
                theirs, greeting.own = str(message["challenge"]), Credentials.challenge()
                greeting.challenges = theirs + greeting.own
                answer = {"proof": credentials.proof("host", theirs), "challenge": greeting.own}
                with contextlib.suppress(OSError):  # its end is noticed by a read
                    connection.send(encode({"start": credentials.start, **answer}))
                continue
            hello = str(message.get("hello"))
            if not credentials.proves(message.get("proof"), "client", greeting.own, hello):
                self._dismiss(connection)
                return
            del self._unknown[connection]
            link = Link(connection, credentials, greeting.challenges, "message", "answer")
            link.rest = greeting.rest
            self._links[connection] = link
            self._put((link, decode(hello.encode())))
            return

    def _read(self, connection: socket.socket) -> None:
        link = self._links[connection]
        data = _data(connection)
        if data is None:
            return
        link.rest += data
        wrong = not data or len(link.rest) > _LONGEST_LINE
        try:
            while b"\n" in link.rest:
                line, _, link.rest = link.rest.partition(b"\n")
                self._put((link, link.read(line)))
        except OSError:
            wrong = True
        if wrong:
            del self._links[connection]
            self._selector.unregister(connection)
            connection.close()
            self._put((link, None))


class _Greeting:
    """State of a connection before its proof."""

    def __init__(self, since: float) -> None:
        self.since, self.rest, self.own, self.challenges = since, b"", "", ""


def connect(
    places: Sequence[Place],
    launch: str,
    secret: str,
    hello: Callable[[str], Message],
    seconds: float,
) -> Link:
    """Connect to the supervisor at one of its places.

    Args:
        places: addresses and ports to try, the likeliest first.
        launch, secret: as for `AgentLinks`.
        hello: function that returns the first message, for the own address.
        seconds: how long to try.

    Raises:
        StartError: no place answers.
    """
    credentials, deadline = Credentials(launch, secret), time.monotonic() + seconds
    while True:
        answers = []
        for place in places:
            try:
                return _connect(place, credentials, hello)
            except OSError as error:
                answers.append(f"{place[0]}: {error.strerror or error}")
        if time.monotonic() > deadline:
            node, port, text = socket.gethostname(), places[0][1], "; ".join(answers)
            key = "HT202.no-supervisor"
            raise StartError(key, node=node, waited_s=seconds, port=port, answers=text)
        time.sleep(_PAUSE)


def _connect(place: Place, credentials: Credentials, hello: Callable[[str], Message]) -> Link:
    connection = socket.create_connection(place, _SECONDS_FOR_A_PLACE)
    try:
        connection.settimeout(_SECONDS_TO_GREET)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = Credentials.challenge()
        connection.sendall(encode({"start": credentials.start, "challenge": own}))
        answer, rest = b"", b""
        while b"\n" not in answer:
            data = connection.recv(_CHUNK)
            if not data or len(answer) > _LONGEST_HELLO:
                raise ConnectionError("another program answers")
            answer += data
        answer, _, rest = answer.partition(b"\n")
        message = decode(answer)
        theirs = str(message.get("challenge"))
        if not credentials.proves(message.get("proof"), "host", own):
            raise ConnectionError("another program answers")
        text = json.dumps(hello(_plain(connection.getsockname()[0])))
        proof = credentials.proof("client", theirs, text)
        connection.sendall(encode({"proof": proof, "hello": text}))
        keep_alive(connection, SECONDS_OF_AGENT, _INTERVAL)
        link = Link(connection, credentials, own + theirs, "answer", "message")
        link.rest = rest
    except BaseException:
        connection.close()
        raise
    return link


def _data(connection: socket.socket) -> bytes | None:
    """Return what has arrived; empty at the end of the connection, None for nothing yet."""
    try:
        return connection.recv(_CHUNK)
    except (BlockingIOError, TimeoutError):
        return None
    except OSError:
        return b""


def _plain(address: str) -> str:
    """Return an address of IPv4 without the prefix that a socket of IPv6 puts in front."""
    return address.removeprefix("::ffff:")
