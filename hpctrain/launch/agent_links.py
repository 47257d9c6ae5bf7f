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

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.errors import StartError
from hpctrain.rendezvous.connections import Connection, greet, serve, welcome
from hpctrain.rendezvous.messages import LONGEST_HELLO, Credentials, decode, encode, keep_alive

__all__ = ["AgentLinks", "Link", "connect", "join"]

# The agent kills its ranks after the first of them; then the supervisor calls the host lost.
SECONDS_OF_AGENT = 8
SECONDS_TO_DETECT = 10
_INTERVAL = 1
_SECONDS_FOR_A_PLACE = 2.0
_SECONDS_TO_GREET = 10.0
_PAUSE = 0.2
_MOST_UNKNOWN = 256

Place = tuple[str, int]
Message = dict[str, Any]
# What happened on a link: a message of the agent, "hello" first; None at its end.
Received = tuple["Link", Message | None]


class Link:
    """One side of a connection, after both sides have proved that they belong to the launch.

    Args:
        connection: the connection; it has the challenges of both sides, the agent's first.
        credentials: credentials of the launch.
        sends, receives: names of the two directions, for the proofs.

    Attributes:
        address: address of the other side.
        host: name of the host of the agent, once the supervisor knows it.
    """

    def __init__(
        self, connection: Connection, credentials: Credentials, sends: str, receives: str
    ) -> None:
        self.address, self.host = connection.address, ""
        self._connection, self._credentials = connection, credentials
        self._loop = asyncio.get_running_loop()
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message; if the connection has ended, `deliver` finds that."""
        text = json.dumps(message)
        with self._lock:
            self._sent += 1
            numbered = f"{self._connection.challenges} {self._sent}"
            proof = self._credentials.proof(self._sends, numbered, text)
            self._call(self._connection.send, encode({"proof": proof, "text": text}))

    def end(self) -> None:
        """End the connection."""
        self._call(self._connection.close)

    def follow(self, put: Callable[[Received], None]) -> None:
        """Deliver the messages in a thread."""

        def run() -> None:
            with contextlib.closing(self._loop):
                self._loop.run_until_complete(self.deliver(put))

        threading.Thread(target=run, name="hpctrain link", daemon=True).start()

    async def deliver(self, put: Callable[[Received], None]) -> None:
        """Call a function with each message, and with None at the end of the connection."""
        try:
            while True:
                self._received += 1
                record = decode(await self._connection.read())
                text, numbered = str(record.get("text")), self._connection.challenges
                numbered += f" {self._received}"
                if not self._credentials.proves(
                    record.get("proof"), self._receives, numbered, text
                ):
                    return
                put((self, decode(text.encode())))
        except OSError:
            return  # it is lost
        finally:
            self._connection.close()
            put((self, None))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection with it
            self._loop.call_soon_threadsafe(function, *arguments)


class AgentLinks:
    """Links to all agents of a job, and the thread that serves them.

    Args:
        launch: name of the launch.
        secret: secret that only this process and the agents have.
        listener: socket at which the agents connect; it is closed at the end.
        put: function that takes what is received; called in the thread.
    """

    def __init__(
        self,
        launch: str,
        secret: str,
        listener: socket.socket,
        put: Callable[[Received], None],
    ) -> None:
        self._credentials, self._put = Credentials(launch, secret), put
        self._unknown: dict[Connection, None] = {}
        keep_alive(listener, SECONDS_TO_DETECT, _INTERVAL)
        self._listener, self._loop = listener, asyncio.new_event_loop()
        self._task = self._loop.create_task(serve(listener, self._converse, LONGEST_HELLO))
        self._thread = threading.Thread(target=self._run, name="hpctrain agents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and listen no more."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        ended = contextlib.suppress(asyncio.CancelledError)
        with contextlib.closing(self._loop), self._listener, ended:
            self._loop.run_until_complete(self._task)

    async def _converse(self, peer: Connection) -> None:
        keep_alive(peer.socket, SECONDS_TO_DETECT, _INTERVAL)
        hello = await welcome(peer, self._credentials, self._unknown, _MOST_UNKNOWN)
        if hello is not None:
            link = Link(peer, self._credentials, "message", "answer")
            self._put((link, decode(hello.encode())))
            await link.deliver(self._put)


def connect(
    places: Sequence[Place],
    launch: str,
    secret: str,
    hello: Callable[[str], Message],
    seconds: float,
) -> Link:
    """Connect to the supervisor at one of its places; `Link.follow` delivers its messages.

    Args:
        places: addresses and ports to try, the likeliest first.
        launch, secret: as for `AgentLinks`.
        hello: function that returns the first message, for the own address.
        seconds: how long to try.

    Raises:
        StartError: no place answers.
    """
    credentials, deadline = Credentials(launch, secret), time.monotonic() + seconds
    loop = asyncio.new_event_loop()
    while True:
        answers = []
        for place in places:
            try:
                return loop.run_until_complete(join(place, credentials, hello))
            except OSError as error:
                answers.append(f"{place[0]}: {error.strerror or error or 'no answer'}")
        if time.monotonic() > deadline:
            loop.close()
            node, port, text = socket.gethostname(), places[0][1], "; ".join(answers)
            key = "HT202.no-supervisor"
            raise StartError(key, node=node, waited_s=seconds, port=port, answers=text)
        time.sleep(_PAUSE)


async def join(place: Place, credentials: Credentials, hello: Callable[[str], Message]) -> Link:
    """Connect to the supervisor at a place.

    Raises:
        OSError: it does not answer there.
    """
    async with asyncio.timeout(_SECONDS_TO_GREET):
        connection, theirs = await greet(place, credentials, _SECONDS_FOR_A_PLACE)
    keep_alive(connection.socket, SECONDS_OF_AGENT, _INTERVAL)
    text = json.dumps(hello(connection.own_address))
    connection.send(encode({"proof": credentials.proof("client", theirs, text), "hello": text}))
    return Link(connection, credentials, "answer", "message")
