"""Connections of the rendezvous over asyncio: lines of JSON each way, on one clock."""

import asyncio
import errno
import math
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hpctrain.rendezvous.messages import (
    LONGEST_LINE,
    Clock,
    Credentials,
    decode,
    encode,
)

__all__ = ["Connection", "greet", "run", "serve", "until", "welcome"]

T = TypeVar("T")

_UNKNOWN_SECONDS = 10.0  # in which a peer has to prove that it belongs to this start
_FULL_SECONDS = 0.1  # pause when the process may open no more files


class Connection:
    """A connection to another process.

    Args:
        reader, writer: streams of asyncio.

    Attributes:
        socket: its socket.
        challenges: challenges of both sides, joined, once the other side has given its proof.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.socket = writer.get_extra_info("socket")
        self.challenges = ""
        writer.transport.set_write_buffer_limits(0)  # so `sent` waits for all bytes

    @property
    def address(self) -> str:
        """Address of the other side."""
        return _plain(self._writer.get_extra_info("peername"))

    @property
    def own_address(self) -> str:
        """Address of this side."""
        return _plain(self._writer.get_extra_info("sockname"))

    async def read(self) -> bytes:
        """Return the next line.

        Raises:
            OSError: the connection is lost, or the line is too long.
        """
        try:
            return await self._reader.readuntil()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from None

    def send(self, *lines: bytes) -> None:
        """Send lines, as soon as the other side accepts them."""
        if not self._writer.is_closing():
            self._writer.writelines(lines)

    async def sent(self) -> None:
        """Wait until all lines are sent.

        Raises:
            OSError: the connection is lost.
        """
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection; `read` then raises an error."""
        self._writer.transport.abort()


async def greet(
    place: tuple[str, int], credentials: Credentials, seconds: float | None = None
) -> tuple[Connection, str]:
    """Connect to an address and port, and find out whether rank 0 of this start is there.

    Args:
        place: the address and port.
        credentials: credentials of this start.
        seconds: longest time until the connection is there; None for that of the kernel.

    Returns:
        The connection, and the challenge of rank 0; that of this side comes first in
        `connection.challenges`.

    Raises:
        OSError: another program listens there, or none.
    """
    async with asyncio.timeout(seconds):
        connection = Connection(*await asyncio.open_connection(*place, limit=LONGEST_LINE))
    try:
        if connection.socket.getsockname() == connection.socket.getpeername():
            # On a free local port TCP can connect a socket to itself.
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        own = Credentials.challenge()
        connection.send(encode({"start": credentials.start, "challenge": own}))
        answer = decode(await connection.read())
        if not credentials.proves(answer.get("proof"), "host", own):
            same = answer.get("start") == credentials.start
            raise OSError(
                "this start, with another HPCTRAIN_SECRET"
                if same
                else "another program listens there"
            )
    except BaseException:
        connection.close()
        raise
    theirs = str(answer.get("challenge"))
    connection.challenges = own + theirs
    return connection, theirs


async def welcome(
    peer: Connection, credentials: Credentials, unknown: dict[Connection, None], most: int
) -> str | None:
    """Let a peer prove that it belongs to this start; the other side of `greet`.

    Args:
        peer: the connection, which gets the challenges.
        credentials: credentials of this start.
        unknown: all connections without a proof so far, the oldest first.
        most: most of them; one more closes the oldest, so silent peers hold nobody back.

    Returns:
        The text with which the peer introduces itself; None without a proof.

    Raises:
        OSError: the connection is lost, or the peer is silent for ten seconds.
    """
    unknown[peer] = None
    if len(unknown) > most:
        next(iter(unknown)).close()
    try:
        async with asyncio.timeout(_UNKNOWN_SECONDS):
            greeting = decode(await peer.read())
            if greeting.get("start") != credentials.start or "challenge" not in greeting:
                return None
            theirs, ours = str(greeting["challenge"]), Credentials.challenge()
            proof = credentials.proof("host", theirs)
            peer.send(encode({"start": credentials.start, "proof": proof, "challenge": ours}))
            message = decode(await peer.read())
    finally:
        del unknown[peer]
    hello = str(message.get("hello"))
    if not credentials.proves(message.get("proof"), "client", ours, hello):
        return None
    peer.challenges = theirs + ours
    return hello


async def serve(
    listener: socket.socket,
    converse: Callable[[Connection], Coroutine[Any, Any, None]],
    limit: int,
    refuse: Callable[[OSError], None] = lambda _: None,
) -> None:
    """Accept connections, and run a conversation for each, until this task is cancelled.

    Args:
        listener: listening socket.
        converse: the conversation. An OSError ends it, and its end closes the connection.
        limit: length of the longest line.
        refuse: function called with the error if a connection cannot be accepted.
    """

    async def run_one(accepted: socket.socket) -> None:
        streams = await asyncio.open_connection(sock=accepted, limit=limit)
        connection = Connection(*streams)
        try:
            await converse(connection)
        except OSError:
            return  # it is lost, or was silent for too long
        finally:
            connection.close()

    listener.setblocking(False)
    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                refuse(error)
                await asyncio.sleep(_FULL_SECONDS)
                continue
            tasks.create_task(run_one(accepted))


async def until(changed: asyncio.Event, condition: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition is true, at most some seconds; return whether it is.

    Args:
        changed: event that is set when the condition may have become true.
        condition: the condition.
        seconds: longest wait.
    """
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds):
            while not condition():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        return bool(condition())
    return True


def run(work: Coroutine[Any, Any, T], clock: Clock) -> T:
    """Run a coroutine in an event loop of its own, with a clock for all its time-outs."""

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.SelectorEventLoop()
        made.time = clock  # type: ignore[method-assign]
        return made

    def run_here() -> T:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(work)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_here()
    # A cell of a notebook runs in the kernel's loop, and a thread has one loop at a time.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run_here).result()


def _plain(name: tuple[Any, ...]) -> str:
    """Return the address in a socket's name; an IPv4 one without the form of IPv6."""
    return str(name[0]).removeprefix("::ffff:")
